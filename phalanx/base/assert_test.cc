// Checked as in a debug build, whatever this build is.
#undef NDEBUG
#include "phalanx/base/assert.h"

#include <gtest/gtest.h>

namespace phalanx {
namespace {

TEST(AssertDeathTest, AFailureNamesConditionPlaceAndText) {
  int evaluated = 0;
  PHALANX_ASSERT(++evaluated == 1, "once");
  EXPECT_EQ(evaluated, 1);
  EXPECT_DEATH(PHALANX_ASSERT(evaluated == 2, "two of them"),
               "assert_test.cc:[0-9]+: assertion 'evaluated == 2' failed: two of them");
}

}  // namespace
}  // namespace phalanx
