#include "phalanx/base/log.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

using ::testing::internal::CaptureStderr;
using ::testing::internal::GetCapturedStderr;

TEST(Log, RankZeroAloneSpeaksUnlessItMatters) {
  CaptureStderr();
  const auto speak_as = [](int rank) {
    std::thread([rank] {  // a rank is a thread's property, so this leaves no trace
      log::set_thread_rank(rank, 4);
      log::info("plan");
      log::info_all_ranks("here");
      log::warn("slow");
      log::warn_once("shared");
      log::error("broken");
      log::debug("hidden");
    })
        .join();
  };
  speak_as(3);
  const std::string other = GetCapturedStderr();
  EXPECT_THAT(other, AllOf(HasSubstr("rank 3: here"), HasSubstr("rank 3: slow"), HasSubstr("rank 3: broken")));
  EXPECT_THAT(other, AllOf(Not(HasSubstr("plan")), Not(HasSubstr("hidden")), Not(HasSubstr("shared"))));
  CaptureStderr();
  speak_as(0);
  EXPECT_THAT(GetCapturedStderr(),
              AllOf(HasSubstr("info - plan"), HasSubstr("rank 0: slow"), HasSubstr("warning - shared")));
}

TEST(Log, LevelSilencesWhatLiesBelow) {
  CaptureStderr();
  log::set_level(log::Level::error);
  log::warn("unheard");
  log::error("heard");
  log::set_level(log::Level::debug);
  log::debug("detail");
  log::set_level(log::Level::info);
  const std::string text = GetCapturedStderr();
  EXPECT_THAT(text, AllOf(HasSubstr("error - heard"), HasSubstr("debug - detail")));
  EXPECT_THAT(text, Not(HasSubstr("unheard")));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));  // no terminal, no control codes
}

void log_late() { log::warn("written late"); }

// A thread that works when the process ends, such as the flight recorder's, may still log.
TEST(LogDeathTest, LinesCanBeWrittenUntilTheProcessHasEnded) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new process: nothing has been logged in it
  EXPECT_EXIT(
      {
        std::atexit(log_late);  // before the logger is made, so after the objects that are made with it have gone
        log::warn("written");
        std::exit(0);
      },
      testing::ExitedWithCode(0), "written late");
}

}  // namespace
}  // namespace phalanx
