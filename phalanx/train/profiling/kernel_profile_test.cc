// Which operators a profile names, how it divides time among nested ones, and that a process has one at a time.
#include "phalanx/train/profiling/kernel_profile.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <map>
#include <sstream>
#include <string>

#include "phalanx/base/file.h"
#include "phalanx/base/testing/folder_test.h"

namespace phalanx::train::kernel_profile_test {
namespace {

struct Row {
  int calls = 0;
  double share = 0.0;
};

std::map<std::string, Row> rows_of(const std::string& text) {
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  std::getline(lines, line);
  std::map<std::string, Row> rows;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    Row row;
    double ms = 0.0;
    std::string name;
    words >> row.calls >> ms >> row.share >> name;
    rows[name] = row;
  }
  return rows;
}

using KernelProfileTest = FolderTest;

TEST_F(KernelProfileTest, CountsOperatorsAndTheirOwnTime) {
  const at::Tensor x = at::ones({64, 64}), weight = at::ones({64, 64});
  auto profile = KernelProfile::start(at::kCPU);
  ASSERT_NE(profile, nullptr);
  EXPECT_EQ(KernelProfile::start(at::kCPU), nullptr) << "two at once in one process";
  for (int i = 0; i < 3; ++i) at::linear(x, weight);  // calls aten::mm within aten::matmul within aten::linear
  profile->write(path("kernels"));
  at::linear(x, weight);  // is not recorded

  const std::string text = read_file(path("kernels.txt"));
  EXPECT_THAT(text, testing::MatchesRegex("[0-9]+ operators in [0-9.]+ ms, in [0-9.]+ % of which one at least.*"));
  const auto rows = rows_of(text);
  ASSERT_EQ(rows.count("aten::linear"), 1U) << text;
  ASSERT_EQ(rows.count("aten::mm"), 1U) << text;
  EXPECT_EQ(rows.at("aten::linear").calls, 3);
  EXPECT_EQ(rows.at("aten::mm").calls, 3);
  double shares = 0.0;
  for (const auto& [name, row] : rows) shares += row.share;
  EXPECT_LE(shares, 100.1) << "nested time is counted twice: " << text;
  EXPECT_GT(shares, 1.0);
  EXPECT_TRUE(nlohmann::json::parse(read_file(path("kernels.json"))).contains("traceEvents"));
  EXPECT_NE(KernelProfile::start(at::kCPU), nullptr) << "the process may record again";
}

TEST_F(KernelProfileTest, OneThatIsNotWrittenLeavesNothing) {
  { const auto forgotten = KernelProfile::start(at::kCPU); }
  auto profile = KernelProfile::start(at::kCPU);
  ASSERT_NE(profile, nullptr);
  profile->write(path("none"));
  EXPECT_THAT(read_file(path("none.txt")), testing::Not(testing::HasSubstr("aten::linear")));
}

}  // namespace
}  // namespace phalanx::train::kernel_profile_test
