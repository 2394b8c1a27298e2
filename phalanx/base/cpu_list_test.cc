#include "phalanx/base/cpu_list.h"

#include <gtest/gtest.h>

#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

TEST(CpuList, GoesBothWays) {
  EXPECT_THAT(cpus_in_list("0-2,8").value(), ElementsAre(0, 1, 2, 8));
  EXPECT_THAT(cpus_in_list("8,0-3,2").value(), ElementsAre(0, 1, 2, 3, 8));
  EXPECT_THAT(cpus_in_list("0-1\n").value(), ElementsAre(0, 1));  // like the end of the kernel's files
  EXPECT_THAT(cpus_in_list("").value(), ElementsAre());
  EXPECT_THAT(cpus_in_list("\n").value(), ElementsAre());
  EXPECT_EQ(cpu_list_text({0, 1, 2, 8, 10, 11}), "0-2,8,10-11");
  EXPECT_EQ(cpu_list_text({}), "");
}

TEST(CpuList, OtherTextsAreNone) {
  for (const char* bad : {"a", "3-1", "-1", "1-", "1,,2", "1,,x", ",1", "0-99999999", "99999999999", "1 2"})
    EXPECT_FALSE(cpus_in_list(bad).has_value()) << bad;
}

}  // namespace
}  // namespace phalanx
