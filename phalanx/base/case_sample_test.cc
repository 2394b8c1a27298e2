#include "phalanx/base/testing/case_sample.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

class CaseSampleTest : public testing::Test {
 protected:
  CaseSampleTest() { unset("PHALANX_ALL_CASES"); }
  ~CaseSampleTest() override {
    for (const auto& [name, value] : before_) {
      value ? ::setenv(name.c_str(), value->c_str(), 1) : ::unsetenv(name.c_str());
    }
  }
  void set(const std::string& name, const std::string& value) {
    before_.emplace(name, env_string(name));
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  void unset(const std::string& name) {
    before_.emplace(name, env_string(name));
    ::unsetenv(name.c_str());
  }

 private:
  std::map<std::string, std::optional<std::string>> before_;
};

const std::vector<int> kCases = {10, 11, 12, 13, 14, 15, 16};

TEST_F(CaseSampleTest, TakesSomeInTheirOrder) {
  const std::vector<int> drawn = sampled(kCases, 3);
  EXPECT_EQ(drawn.size(), 3U);
  EXPECT_TRUE(std::ranges::is_sorted(drawn));
  EXPECT_THAT(kCases, testing::IsSupersetOf(drawn));
  EXPECT_EQ(sampled(kCases, 7), kCases);
  EXPECT_EQ(sampled(kCases, 100), kCases);
  EXPECT_THAT(sampled(std::vector<int>(), 3), IsEmpty());
  EXPECT_EQ(first_and_sampled(kCases, 2).size(), 3U);
  EXPECT_EQ(first_and_sampled(kCases, 2).front(), 10);
}

TEST_F(CaseSampleTest, SeedsAndPassesOfALoopTakeOthersAndMissNone) {
  std::set<std::vector<int>> of_seeds, of_passes;
  std::set<int> taken;
  for (int seed = 0; seed < 60; ++seed) {
    set("PHALANX_TEST_SEED", std::to_string(seed));
    const std::vector<int> drawn = sampled(kCases, 2);
    of_seeds.insert(drawn);
    taken.insert(drawn.begin(), drawn.end());
  }
  set("PHALANX_TEST_SEED", "5");
  for (int pass = 0; pass < 60; ++pass) of_passes.insert(sampled(kCases, 2));
  EXPECT_GT(of_seeds.size(), 10U);  // of 21
  EXPECT_GT(of_passes.size(), 10U);
  EXPECT_EQ(taken.size(), kCases.size());
}

TEST_F(CaseSampleTest, TakesAllWhereAsked) {
  set("PHALANX_ALL_CASES", "1");
  EXPECT_EQ(sampled(kCases, 1), kCases);
  EXPECT_EQ(first_and_sampled(kCases, 1), kCases);
}

}  // namespace
}  // namespace phalanx
