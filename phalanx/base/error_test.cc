#include <gtest/gtest.h>

#include "phalanx/base/error.h"

TEST(Error, ExitStatusSeparatesUsageFromFailure) {
  EXPECT_EQ(phalanx::ConfigError("x").exit_status(), 2);
  EXPECT_EQ(phalanx::CommError("x").exit_status(), 1);
}
