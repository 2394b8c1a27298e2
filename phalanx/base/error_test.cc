#include <gtest/gtest.h>

#include <filesystem>
#include <stdexcept>

#include "phalanx/base/error.h"
#include "phalanx/base/error_text.h"
#include "phalanx/base/temp_directory.h"

TEST(Error, ExitStatusSeparatesUsageFromFailure) {
  EXPECT_EQ(phalanx::ConfigError("x").exit_status(), 2);
  EXPECT_EQ(phalanx::CommError("x").exit_status(), 1);
}

TEST(Error, TextHasNothingOfLibraries) {
  const phalanx::TempDirectory folder;
  const auto a = folder.path() / "a", b = folder.path() / "b";
  try {
    std::filesystem::rename(a, b);
    FAIL();
  } catch (const std::exception& error) {
    EXPECT_EQ(phalanx::error_text(error),
              "cannot rename " + a.string() + " to " + b.string() + ": No such file or directory");
  }
  EXPECT_EQ(phalanx::error_text(std::runtime_error("too large\nException raised from empty at A.cpp:73\nframe #0")),
            "too large");
  EXPECT_EQ(phalanx::error_text(phalanx::DataError("two\nlines")), "two\nlines");
}
