#include "phalanx/base/quick_exit.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

struct SaysWhenDestroyed {
  const char* text;
  ~SaysWhenDestroyed() { std::fputs(text, stderr); }
};

TEST(QuickExit, LeavesOutWhatWasThereBeforeAndNothingElse) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "skipped: under a sanitizer the call does nothing";
#endif
  const TempDirectory folder;
  const std::string path = (folder.path() / "buffered").string();
  EXPECT_EXIT(
      {
        static const SaysWhenDestroyed before{"destroyed-before "};
        skip_earlier_static_destructors();
        static const SaysWhenDestroyed after{"destroyed-after "};
        std::atexit([] { std::fputs("handler-after ", stderr); });
        std::FILE* file = std::fopen(path.c_str(), "w");
        std::fputs("not yet flushed", file);
        std::exit(7);
      },
      ::testing::ExitedWithCode(7),
      AllOf(HasSubstr("destroyed-after"), HasSubstr("handler-after"), Not(HasSubstr("destroyed-before"))));
  EXPECT_EQ(read_file(path), "not yet flushed");
}

}  // namespace
}  // namespace phalanx
