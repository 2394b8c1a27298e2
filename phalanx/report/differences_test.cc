#include "phalanx/report/differences.h"

#include <gtest/gtest.h>

#include "phalanx/base/testing/matchers.h"

namespace phalanx::report {
namespace {

TEST(ConfigValues, AreReadLineByLine) {
  EXPECT_THAT(config_values("[job]\ndescription = \"a = b [c]\"\n\n[model]\n# dim is not set\n# a remark\n"
                            "flavor = \"5M\"\nno value"),
              ElementsAre(Pair("job.description", "\"a = b [c]\""), Pair("model.dim", "not set"),
                          Pair("model.flavor", "\"5M\"")));
  EXPECT_THAT(config_values(""), IsEmpty());
}

TEST(Differences, AreTheValuesThatAreNotTheSameInEachList) {
  const auto found = differences({{{"a", "1"}, {"b", "2"}, {"c", "3"}}, {{"b", "2"}, {"c", "4"}, {"d", "5"}}});
  ASSERT_THAT(found, SizeIs(3));
  EXPECT_EQ(found[0].name, "a");
  EXPECT_THAT(found[0].values, ElementsAre("1", std::nullopt));
  EXPECT_EQ(found[1].name, "c");
  EXPECT_THAT(found[1].values, ElementsAre("3", "4"));
  EXPECT_EQ(found[2].name, "d");
  EXPECT_THAT(found[2].values, ElementsAre(std::nullopt, "5"));
  EXPECT_THAT(differences({{{"a", "1"}}, {{"a", "1"}}}), IsEmpty());
  EXPECT_THAT(side_by_side({{{"a", "1"}}, {{"a", "1"}}}), SizeIs(1));
}

}  // namespace
}  // namespace phalanx::report
