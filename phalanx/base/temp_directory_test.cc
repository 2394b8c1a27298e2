#include "phalanx/base/temp_directory.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

TEST(TempDirectory, IsPrivateUniqueAndGoesWithItsContents) {
  std::filesystem::path where;
  {
    TempDirectory first("test");
    TempDirectory second("test");
    where = first.path();
    EXPECT_NE(first.path(), second.path());
    struct stat info {};
    ASSERT_EQ(stat(where.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0700u);
    std::filesystem::create_directories(where / "a/b");
    std::ofstream(where / "a/b/file") << "x";
  }
  EXPECT_FALSE(std::filesystem::exists(where));
}

TEST(TempDirectory, MissingParentIsNamed) {
  const char* old = std::getenv("TMPDIR");
  const std::string kept = old != nullptr ? old : "";
  setenv("TMPDIR", "/nowhere/at/all", 1);
  EXPECT_THAT([] { TempDirectory("x"); },
              ::testing::ThrowsMessage<FileError>(AllOf(HasSubstr("/nowhere/at/all"), HasSubstr("TMPDIR"))));
  kept.empty() ? unsetenv("TMPDIR") : setenv("TMPDIR", kept.c_str(), 1);
}

}  // namespace
}  // namespace phalanx
