#include "phalanx/base/remedy.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <string>

#include "phalanx/base/error_text.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

TEST(Remedy, TheLimitThatWasMetIsNamedWithHowToRaiseIt) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const std::string text = with_remedy("eventfd: Too many open files");
  EXPECT_EQ(text, "eventfd: Too many open files; RLIMIT_NOFILE is " + std::to_string(limit.rlim_cur) +
                      " files and connections of a process (ulimit -n): raise it, to 1024 or more");
  EXPECT_EQ(with_remedy(text), text);
}

TEST(Remedy, AFullOrReadOnlyPlaceIsToBeChanged) {
  EXPECT_EQ(with_remedy("cannot write 9 bytes to /run/x: No space left on device"),
            "cannot write 9 bytes to /run/x: No space left on device; make room there, or choose another place");
  EXPECT_THAT(with_remedy("cannot make directory /run: Read-only file system"), HasSubstr("; choose a place that can"));
}

TEST(Remedy, OtherMessagesStayAsTheyAre) {
  for (const char* text : {"", "step 3: the loss is nan", "cannot open x: No such file or directory"})
    EXPECT_EQ(with_remedy(text), text);
}

TEST(ErrorText, TheStandardLibrarysErrorsReadAsOurs) {
  const TempDirectory folder("remedy");
  const std::string path = (folder.path() / "missing").string();
  try {
    std::filesystem::directory_iterator entries(path);
    FAIL();
  } catch (const std::filesystem::filesystem_error& error) {
    EXPECT_THAT(error_text(error), StartsWith("directory iterator cannot open directory " + path + ": No such"));
  }
}

}  // namespace
}  // namespace phalanx
