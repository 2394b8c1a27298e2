#include "phalanx/base/folder_lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <thread>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

std::string lock_refusal(const std::filesystem::path& folder, const FolderLockOptions& options = {}) {
  return error_text([&] { const FolderLock lock(folder, options); });
}

TEST(FolderLock, ASecondHolderIsRefusedUntilTheFirstIsGone) {
  const TempDirectory scratch("folder_lock");
  const auto folder = scratch.path() / "new" / "run";
  {
    const FolderLock lock(folder);
    EXPECT_EQ(lock.unsupported(), "");
    EXPECT_THAT(lock_refusal(folder, {.advice = "choose another folder"}),
                AllOf(HasSubstr(folder.string() + " is in use by process " + std::to_string(::getpid()) + " on host "),
                      HasSubstr("wait until it has ended, stop it, or choose another folder")));
    EXPECT_EQ(lock_refusal(scratch.path()), "") << "another folder";
    // Opening and closing the file elsewhere does not release the lock, as it would with POSIX's older locks.
    read_file(folder / kFolderLockName);
    EXPECT_NE(lock_refusal(folder), "");
  }
  EXPECT_EQ(lock_refusal(folder), "");
}

TEST(FolderLock, ItGoesWithAProcessThatIsKilledAndIsWaitedFor) {
  const TempDirectory scratch("folder_lock");
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const FolderLock lock(scratch.path());
    if (::write(pipe[1], "x", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char held = 0;
  ASSERT_EQ(::read(pipe[0], &held, 1), 1);
  EXPECT_THAT(lock_refusal(scratch.path()), HasSubstr("is in use by process " + std::to_string(child)));
  std::vector<std::string> said;
  const FolderLock mine(scratch.path(), {.wait = std::chrono::seconds(60), .log_info = [&](const std::string& line) {
                                           said.push_back(line);
                                           ::kill(child, SIGKILL);
                                         }});
  ASSERT_EQ(said.size(), 1u);
  EXPECT_THAT(said[0], AllOf(HasSubstr("is in use by process " + std::to_string(child)), HasSubstr("waiting up to")));
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_THAT(lock_refusal(scratch.path()), HasSubstr("in use by process " + std::to_string(::getpid())));
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST(OwnerLocks, WhatLiesInALockedFolderIsRefusedHoweverDeep) {
  const TempDirectory scratch("folder_lock");
  const auto run = scratch.path() / "run", link = scratch.path() / "link";
  const auto refused = [](const std::vector<std::filesystem::path>& paths) {
    return error_text([&] {
      const OwnerLocks locks(paths, {.advice = "choose another OUT"});
      EXPECT_TRUE(locks.warnings().empty());
    });
  };
  {
    const FolderLock lock(run);
    std::filesystem::create_directory_symlink(run, link);
    for (const auto& path : {run, run / "checkpoint", run / "checkpoint" / "step-7" / "file", link / "x",
                             scratch.path() / "other" / ".." / "run" / "x"}) {
      EXPECT_THAT(refused({scratch.path() / "beside", path}),
                  AllOf(HasSubstr("run is in use by process " + std::to_string(::getpid()) + " on host "),
                        HasSubstr("choose another OUT")))
          << path;
    }
    EXPECT_EQ(refused({scratch.path() / "beside"}), "");
    EXPECT_EQ(refused({scratch.path() / "running"}), "") << "a name that begins so is another folder";
  }
  // A finished run has left the lock file. While a command writes there, no run starts. Two paths in it are one lock.
  const OwnerLocks locks({run / "a", run / "b" / "c"});
  EXPECT_NE(lock_refusal(run), "");
}

TEST(FolderLock, AFolderThatCannotBeWrittenToIsNamed) {
  const TempDirectory scratch("folder_lock");
  write_file(scratch.path() / "file", "x");
  EXPECT_THAT(lock_refusal(scratch.path() / "file"), HasSubstr((scratch.path() / "file").string()));
}

}  // namespace
}  // namespace phalanx
