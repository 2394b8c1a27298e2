#include "phalanx/launch/supervisor/launch_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"

namespace phalanx {
namespace {

namespace fs = std::filesystem;

class LaunchFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* before = std::getenv("TMPDIR")) before_ = before;
    ::setenv("TMPDIR", folder_.path().c_str(), 1);
  }
  void TearDown() override { before_.empty() ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", before_.c_str(), 1); }

  /// Makes a folder as a launcher does, last changed `age` ago.
  fs::path folder(const std::string& name, const std::string& file, std::chrono::seconds age) const {
    const fs::path path = folder_.path() / ("phalanx-launch-" + name);
    fs::create_directory(path);
    if (!file.empty()) write_file(path / file, "");
    fs::last_write_time(path, fs::file_time_type::clock::now() - age);
    return path;
  }

  TempDirectory folder_{"launch-folder"};
  std::string before_;
};

TEST_F(LaunchFolderTest, OneWhoseLauncherDiedBeforeItHadLockedItIsRemoved) {
  using std::chrono::seconds;
  const fs::path empty = folder("empty", "", seconds(100)), unlocked = folder("unlocked", "owner.new", seconds(100)),
                 young = folder("young", "owner.new", seconds(5)), locked = folder("locked", "owner.new", seconds(100)),
                 used = folder("used", "rank_0.log", seconds(100));
  const UniqueFd lock(::open((locked / "owner.new").c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(lock.get(), LOCK_EX | LOCK_NB), 0);
  const fs::path elsewhere = folder("elsewhere", "", seconds(0));
  write_file(elsewhere / "owner.new", "another machine's kernel");
  fs::last_write_time(elsewhere, fs::file_time_type::clock::now() - seconds(100));
  const LaunchFolder own;
  EXPECT_FALSE(fs::exists(empty));
  EXPECT_FALSE(fs::exists(unlocked));
  EXPECT_TRUE(fs::exists(young)) << "its launcher may be at work";
  EXPECT_TRUE(fs::exists(locked));
  EXPECT_TRUE(fs::exists(elsewhere));
  EXPECT_TRUE(fs::exists(used));
  EXPECT_TRUE(fs::exists(own.path() / "owner"));
}

TEST_F(LaunchFolderTest, OneWhoseOwnersLiveStays) {
  const LaunchFolder first;
  LaunchFolder::remove_abandoned();
  EXPECT_TRUE(fs::exists(first.path()));
}

}  // namespace
}  // namespace phalanx
