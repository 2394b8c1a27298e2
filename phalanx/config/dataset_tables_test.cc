#include "phalanx/config/dataset_tables.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "phalanx/config/testing/parse.h"

namespace phalanx::config::dataset_tables_test {
namespace {

/// The error of a single table with these lines.
std::string refusal_of(const std::string& lines) { return refusal("[[training.datasets]]\n" + lines); }

constexpr std::string_view kTwo = R"(
[training]
steps = 7
[[training.datasets]]
path = "data/web/train.bin"
weight = 0.7
[[training.datasets]]
path = "data/code/"
weight = 1
name = "all \"code\""
range = [10, 2000]
)";

TEST(Datasets, AreTablesOfThePathWeightNameAndRange) {
  const TrainConfig config = parse(kTwo);
  EXPECT_EQ(config.training.steps, 7);
  const Datasets expected = {
      {.path = "data/web/train.bin", .weight = 0.7, .name = "train"},
      {.path = "data/code/", .weight = 1, .name = "all \"code\"", .range = Dataset::Range{10, 2000}}};
  EXPECT_EQ(config.training.datasets, expected);
  EXPECT_EQ(training_datasets(config), expected);
  EXPECT_EQ(parse("[[training.datasets]]\npath = \"data/code/\"\n").training.datasets[0].name, "code");
  EXPECT_EQ(training_datasets(parse("[training]\ndataset_path = \"a\"\n")), (Datasets{{.path = "a"}}));
  EXPECT_THAT(training_datasets(parse("")), IsEmpty());
}

TEST(Datasets, ArePrintedSoThatTheyAreReadAgain) {
  const TrainConfig config = parse(kTwo);
  EXPECT_EQ(parse(print_config(config)).training.datasets, config.training.datasets);
  EXPECT_EQ(parse(print_config(TrainConfig())).training.datasets, Datasets());
}

TEST(Datasets, AFlagReplacesThoseOfTheFile) {
  const TrainConfig config =
      parse(kTwo, {"--training.datasets", R"([{path = "x.bin"}, {path = "y.idx", weight = 3}])"});
  EXPECT_EQ(config.training.datasets,
            (Datasets{{.path = "x.bin", .name = "x"}, {.path = "y.idx", .weight = 3, .name = "y"}}));
  EXPECT_THAT(parse(kTwo, {"--training.datasets=[]"}).training.datasets, IsEmpty());
  for (const char* wrong : {"x.bin", "[{path = \"x\"]", "{path = \"x\"}", "[1]\nother = 2"}) {
    EXPECT_THAT(refusal(kTwo, {"--training.datasets", wrong}),
                AllOf(HasSubstr("--training.datasets"), HasSubstr("expected a TOML list of tables")))
        << wrong;
  }
}

TEST(Datasets, WhatIsWrongIsSaidWithItsLineAndWhatToDo) {
  EXPECT_THAT(refusal_of("weight = 1\n"),
              AllOf(HasSubstr("run.toml:1: [training] datasets, set 1: has no path"), HasSubstr("phalanx tokenize")));
  EXPECT_THAT(refusal_of("pth = \"a\"\n"), HasSubstr("unknown key pth (did you mean 'path'?)"));
  EXPECT_THAT(refusal_of("path = 1\n"), HasSubstr("path is no string"));
  for (const char* weight : {"0", "-0.5", "nan", "inf", "\"a\""}) {
    EXPECT_THAT(refusal_of(std::string("path = \"a\"\nweight = ") + weight + "\n"),
                AllOf(HasSubstr("weight is "), HasSubstr("expected a number above 0")))
        << weight;
  }
  for (const char* range : {"[1]", "[5, 5]", "[-1, 5]", "[0, 1.5]", "\"all\""}) {
    EXPECT_THAT(refusal_of(std::string("path = \"a\"\nrange = ") + range + "\n"),
                HasSubstr("range is not [begin, end]"))
        << range;
  }
  EXPECT_THAT(refusal_of("path = \"a\"\nname = \"\"\n"), HasSubstr("name is empty"));
  EXPECT_THAT(refusal_of("path = \"a/t\"\n[[training.datasets]]\npath = \"b/t\"\n"),
              AllOf(HasSubstr("set 2: 't' is the name of a/t, too"), HasSubstr("another name")));
  EXPECT_THAT(refusal("[training]\ndatasets = [\"a\", \"b\"]\n"),
              AllOf(HasSubstr("[training] datasets is"), HasSubstr("a list of tables, each with a path")));
  EXPECT_THAT(refusal("[training]\ndatasets = [1, 2]\n"), HasSubstr("expected a table with a path"));
}

TEST(Datasets, KeysThatExcludeEachOtherAreRefused) {
  EXPECT_THAT(refusal(kTwo, {"--training.dataset_path=a"}),
              AllOf(HasSubstr("dataset_path is 'a'"), HasSubstr("expected one of them")));
  EXPECT_THAT(refusal("[validation]\nenable = true\ndataset_path = \"a\"\n[[validation.datasets]]\npath = \"b\"\n"),
              HasSubstr("expected one of them"));
  EXPECT_THAT(refusal("[[validation.datasets]]\npath = \"b\"\nweight = 2\n"),
              AllOf(HasSubstr("'b' has a weight"), HasSubstr("counts once")));
  EXPECT_THAT(refusal("[[training.datasets]]\npath = \"a\"\nweight = 100000\n[[training.datasets]]\npath = \"b\"\n"),
              AllOf(HasSubstr("'b'"), HasSubstr("less than one row in 10000")));
  const TrainConfig config =
      parse("[validation]\nenable = true\nfraction = 0\n[[validation.datasets]]\npath = \"b\"\n");
  EXPECT_EQ(config.validation.datasets[0].name, "b");
}

}  // namespace
}  // namespace phalanx::config::dataset_tables_test
