#include "phalanx/base/descriptor_limit.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace phalanx {
namespace {

TEST(DescriptorLimit, IsRaisedToTheHardLimitOnce) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low{.rlim_cur = 100, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_TRUE(raise_descriptor_limit());
  rlimit after{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &after), 0);
  EXPECT_EQ(after.rlim_cur, before.rlim_max);
  EXPECT_FALSE(raise_descriptor_limit());
  setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace phalanx
