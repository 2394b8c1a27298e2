#include "phalanx/report/metrics_file.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::report {
namespace {

using ::testing::DoubleEq;
using ::testing::NanSensitiveDoubleEq;

class MetricsFileTest : public FolderTest {
 protected:
  MetricsFile read(const std::string& text) { return read_metrics(write("metrics.jsonl", text)); }
};

TEST_F(MetricsFileTest, EachKeyIsACurve) {
  const MetricsFile metrics = read(
      "{\"step\":1,\"loss\":9.5,\"lr\":0.5,\"grad_norm\":2,\"tps\":100,\"exposed_percent\":3.5,\"mfu_percent\":40,"
      "\"seconds\":0.25,\"tokens\":64,\"nested\":{\"loss\":1,\"step\":7},\"list\":[1,[2]]}\n"
      "\r\n{\"step\":2,\"loss\":9}\r\n{\"step\":2,\"validation_loss\":8.75,\"tokens\":5,\"seconds\":1}\n");
  EXPECT_THAT(metrics.steps, ElementsAre(1, 2));
  const std::pair<const char*, double> first[] = {
      {"loss", 9.5},       {"lr", 0.5},       {"grad_norm", 2}, {"tps", 100}, {"exposed_percent", 3.5},
      {"mfu_percent", 40}, {"seconds", 0.25}, {"tokens", 64}};
  for (const auto& [key, value] : first) {
    EXPECT_EQ(metrics.curve(key).steps.at(0), 1) << key;
    EXPECT_EQ(metrics.curve(key).values.at(0), value) << key;
  }
  EXPECT_THAT(metrics.curve("loss").values, ElementsAre(9.5, 9));
  EXPECT_THAT(metrics.curve("lr").steps, ElementsAre(1));
  EXPECT_TRUE(metrics.curve("another").empty());
  EXPECT_THAT(metrics.validation_loss.steps, ElementsAre(2));
  EXPECT_THAT(metrics.validation_loss.values, ElementsAre(8.75));
  EXPECT_THAT(metrics.notes, IsEmpty());
}

TEST_F(MetricsFileTest, NullNanAndInfinityAreValuesThatAreNotFinite) {
  const MetricsFile metrics = read(
      "{\"step\":1,\"loss\":null}\n{\"step\":2,\"loss\":NaN,\"note\":\"NaN \\\" "
      "NaN\"}\n{\"step\":3,\"loss\":Infinity}\n"
      "{\"step\":4,\"loss\":-Infinity,\"lr\":1}\n{\"step\":5,\"loss\":5}\n");
  EXPECT_THAT(metrics.curve("loss").steps, ElementsAre(1, 2, 3, 4, 5));
  EXPECT_THAT(metrics.curve("loss").values,
              ElementsAre(NanSensitiveDoubleEq(NAN), NanSensitiveDoubleEq(NAN), NanSensitiveDoubleEq(NAN),
                          NanSensitiveDoubleEq(NAN), DoubleEq(5)));
  EXPECT_THAT(metrics.curve("lr").values, ElementsAre(1));
}

TEST_F(MetricsFileTest, OfTwoLinesOfAStepTheLaterCounts) {
  const MetricsFile metrics = read(
      "{\"step\":1,\"loss\":9,\"memory_gib\":[1]}\n{\"step\":3,\"loss\":7,\"memory_gib\":[3]}\n"
      "{\"step\":2,\"loss\":8,\"memory_gib\":[2]}\n{\"step\":3,\"loss\":6,\"memory_gib\":[4]}\n");
  EXPECT_THAT(metrics.steps, ElementsAre(1, 2, 3));
  EXPECT_THAT(metrics.curve("loss").values, ElementsAre(9, 8, 6));
  EXPECT_THAT(metrics.memory_highest.values, ElementsAre(1, 2, 4));
}

TEST_F(MetricsFileTest, MemoryIsOfEachRankOrOfTheOutermostOnes) {
  const MetricsFile few = read(
      "{\"step\":1,\"memory_gib\":[0.5,1.5]}\n{\"step\":2,\"memory_gib\":[0.75]}\n"
      "{\"step\":3,\"memory_gib\":2.5}\n{\"step\":4,\"memory_gib\":[null,1]}\n{\"step\":5}\n");
  ASSERT_EQ(few.memory_by_rank.size(), 2U);
  EXPECT_THAT(few.memory_by_rank[1].steps, ElementsAre(1, 4));
  EXPECT_THAT(few.memory_highest.values, ElementsAre(1.5, 0.75, 2.5, 1));
  EXPECT_THAT(few.memory_lowest.values, ElementsAre(0.5, 0.75, 2.5, 1));
  EXPECT_THAT(few.ranks.values, ElementsAre(2, 1, 1, 2));
  const MetricsFile many = read("{\"step\":1,\"memory_gib\":[1,2,3,4,5,6,7,8,9]}\n");
  EXPECT_THAT(many.memory_by_rank, IsEmpty());
  EXPECT_THAT(many.memory_highest.values, ElementsAre(9));
  EXPECT_THAT(many.memory_lowest.values, ElementsAre(1));
}

TEST_F(MetricsFileTest, WhatIsLeftOutIsNoted) {
  const MetricsFile metrics = read(
      "{\"step\":1,\"loss\":\"high\",\"lr\":[1]}\n{\"step\":2,\"loss\":true,\"lr\":NaN}\n{\"step\":2,\"validation_"
      "loss\":{}}\n"
      "{\"step\":3,\"lo");
  EXPECT_THAT(metrics.steps, ElementsAre(1, 2));
  EXPECT_TRUE(metrics.curve("loss").empty());
  EXPECT_TRUE(metrics.validation_loss.empty());
  EXPECT_THAT(metrics.notes,
              ElementsAre(HasSubstr("metrics.jsonl:4: the last line is incomplete"),
                          HasSubstr("\"loss\" is no number in 2 lines"), HasSubstr("\"lr\" is no number in 1 line:"),
                          HasSubstr("\"validation_loss\" is no number in 1 line:")));
}

TEST_F(MetricsFileTest, AnotherLineIsRefusedByItsNumber) {
  const std::pair<const char*, const char*> wrong[] = {{"nonsense", "not JSON"},
                                                       {"[1]", "a list"},
                                                       {"{\"loss\":1}", "no step"},
                                                       {"{\"step\":1.5}", "a broken step"},
                                                       {"{\"step\":18446744073709551615}", "a step that does not fit"},
                                                       {"{\"step\":\"1\"}", "a step of text"},
                                                       {"{\"step\":1} {\"step\":2}", "two objects"},
                                                       {"{\"step\":1,\"a\":\"\xff\"}", "not UTF-8"}};
  for (const auto& [line, what] : wrong) {
    const std::string text = "{\"step\":1}\n" + std::string(line) + "\n{\"step\":2}\n";
    EXPECT_THAT(error_text<DataError>([&] { read(text); }),
                HasSubstr("metrics.jsonl:2: expected a JSON object with an integer \"step\""))
        << what;
  }
  EXPECT_THAT(error_text<DataError>([] { read_metrics("/nowhere/metrics.jsonl"); }),
              HasSubstr("'/nowhere/metrics.jsonl' cannot be read (No such file or directory)"));
  EXPECT_THAT(read("").steps, IsEmpty());
}

}  // namespace
}  // namespace phalanx::report
