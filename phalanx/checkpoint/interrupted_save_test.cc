// A save interrupted anywhere: by an error, a full disk, a crash between any two operations, a real SIGKILL.
// After each, loading must give the previous checkpoint whole, or the new one once it is in place.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <random>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/testing/sharded_state.h"
#include "phalanx/checkpoint/testing/test_state.h"
#include "phalanx/comm/backends/local_shm/local.h"

namespace phalanx {
namespace {

using checkpoint_testing::make_state;
using checkpoint_testing::same_state;

constexpr CheckpointOptions kKeepTwo{.keep_latest_k = 2};

/// What is tested: in a folder with checkpoints of steps 1 and 2, save `step` with the state of `number`.
struct Attempt {
  std::int64_t step;
  std::int64_t number;
};

/// A copy of a folder saved once: copying does not wait for the disk.
void fill_folder(const std::filesystem::path& folder) {
  static const TempDirectory original("interrupted-original");
  if (std::filesystem::is_empty(original.path())) {
    CheckpointManager checkpoints(original.path(), kKeepTwo);
    checkpoints.save(make_state(1), 1);
    checkpoints.save(make_state(2), 2);
  }
  std::filesystem::copy(original.path(), folder, std::filesystem::copy_options::recursive);
}

std::int64_t count_operations(const Attempt& attempt) {
  const TempDirectory scratch("interrupted");
  fill_folder(scratch.path());
  FaultyFileSystem fs(posix_file_system());
  CheckpointManager(scratch.path(), kKeepTwo, nullptr, fs).save(make_state(attempt.number), attempt.step);
  return fs.operations();
}

/// Loads with the real file system; the state must be that of step 2 or of the attempt. Returns whether it is the new.
bool new_one_is_loaded(const std::filesystem::path& folder, const Attempt& attempt) {
  auto state = make_state(77);
  const auto loaded = CheckpointManager(folder).load_latest(state);
  if (!loaded) {
    ADD_FAILURE() << "nothing to load";
    return false;
  }
  const bool is_new = same_state(state, make_state(attempt.number));
  EXPECT_TRUE(is_new || same_state(state, make_state(2)));
  EXPECT_EQ(loaded->step, is_new ? attempt.step : 2);
  return is_new;
}

/// The folder must also be usable: the next save works, and clears every leftover.
void expect_usable(const std::filesystem::path& folder) {
  CheckpointManager checkpoints(folder, kKeepTwo);
  checkpoints.save(make_state(9), 9);
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
  auto state = make_state(0);
  checkpoints.load_latest(state);
  EXPECT_TRUE(same_state(state, make_state(9)));
}

class InterruptedSave : public testing::TestWithParam<std::tuple<Fault, std::int64_t>> {};

TEST_P(InterruptedSave, LeavesALoadableFolderAtEveryOperation) {
  const auto [kind, step] = GetParam();
  const Attempt attempt{step, 5};
  const auto operations = count_operations(attempt);
  ASSERT_GT(operations, 10);
  bool seen_old = false, seen_new = false;
  for (std::int64_t n = 0; n < operations; ++n) {
    SCOPED_TRACE(testing::Message() << "operation " << n << " of " << operations);
    const TempDirectory scratch("interrupted");
    fill_folder(scratch.path());
    FaultyFileSystem fs(posix_file_system(), {.fail_at = n, .kind = kind});
    CheckpointManager checkpoints(scratch.path(), kKeepTwo, nullptr, fs);
    bool reported_saved = true;
    if (kind == Fault::crash) {
      EXPECT_THROW(checkpoints.save(make_state(attempt.number), attempt.step), SimulatedCrash);
      reported_saved = false;
    } else {
      const auto message =
          error_text<CheckpointError>([&] { checkpoints.save(make_state(attempt.number), attempt.step); });
      reported_saved = message.empty();
      if (!reported_saved) {
        EXPECT_THAT(message, HasSubstr("cannot save checkpoint " + (scratch.path() / "step-").string()));
        if (kind == Fault::full) {
          EXPECT_THAT(message, HasSubstr("No space left on device"));
        }
      }
    }
    const bool is_new = new_one_is_loaded(scratch.path(), attempt);
    EXPECT_TRUE(is_new || !reported_saved);  // saved, though removing an old one may have failed
    (is_new ? seen_new : seen_old) = true;
    expect_usable(scratch.path());
  }
  EXPECT_TRUE(seen_old);
  EXPECT_TRUE(seen_new || kind == Fault::full);
}

// Step 3 is a new checkpoint, step 2 replaces one.
INSTANTIATE_TEST_SUITE_P(Faults, InterruptedSave,
                         testing::Combine(testing::Values(Fault::error, Fault::full, Fault::crash),
                                          testing::Values(3, 2)));

TEST(InterruptedFirstSave, IsAFreshStart) {
  for (std::int64_t n = 0; n < 6; ++n) {
    const TempDirectory scratch("interrupted");
    FaultyFileSystem fs(posix_file_system(), {.fail_at = n, .kind = Fault::crash});
    EXPECT_THROW(CheckpointManager(scratch.path(), {}, nullptr, fs).save(make_state(1), 1), SimulatedCrash);
    auto state = make_state(0);
    EXPECT_FALSE(CheckpointManager(scratch.path()).load_latest(state));
  }
}

/// Saves step after step and writes the number of each finished step to the pipe, until it is killed.
[[noreturn]] void save_until_killed(const std::filesystem::path& folder, std::int64_t first_step, int pipe) {
  try {
    CheckpointManager checkpoints(folder, kKeepTwo);
    for (std::int64_t step = first_step;; ++step) {
      checkpoints.save(make_state(step, 20'000), step);
      if (::write(pipe, &step, sizeof step) != sizeof step) ::_exit(2);
    }
  } catch (...) {
    ::_exit(1);
  }
}

/// Waits until the process has finished a step, kills it during a later step, and returns the last step that it
/// reported as finished.
std::int64_t kill_at_random(pid_t child, int progress, std::mt19937& random) {
  std::int64_t finished = 0;
  EXPECT_EQ(::read(progress, &finished, sizeof finished), static_cast<ssize_t>(sizeof finished));
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 8000));  // the moment of the kill
  ::kill(child, SIGKILL);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status)) << "the child ended by itself: " << status;
  for (std::int64_t step = 0; ::read(progress, &step, sizeof step) == static_cast<ssize_t>(sizeof step);) {
    finished = step;
  }
  ::close(progress);
  return finished;
}

TEST(KilledSave, EveryFinishedCheckpointSurvivesSigkillAtAnyMoment) {
  const TempDirectory scratch("killed");
  std::mt19937 random(20);
  std::int64_t loaded_step = 0;
  for (int kill = 0; kill < 10; ++kill) {
    int pipe[2];
    ASSERT_EQ(::pipe(pipe), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::close(pipe[0]);
      save_until_killed(scratch.path(), loaded_step + 1, pipe[1]);
    }
    ::close(pipe[1]);
    const std::int64_t finished = kill_at_random(child, pipe[0], random);

    auto state = make_state(0, 20'000);
    const auto loaded = CheckpointManager(scratch.path()).load_latest(state);
    ASSERT_TRUE(loaded);
    EXPECT_GE(loaded->step, finished);
    EXPECT_TRUE(same_state(state, make_state(loaded->step, 20'000)));
    loaded_step = loaded->step;
  }
}

// Three ranks write their own boxes. Their operations interleave in any order, and number n fails.

constexpr int kRanks = 3;

checkpoint_testing::Layout three_rows() {
  const Placement rows{.splits = {{"dp", 0, {}}}};
  return {"rows", MeshShape({{"dp", kRanks}}), rows, rows, kRanks};
}

void save_three_ranks(const std::filesystem::path& folder, const Attempt& attempt, FileSystem& fs) {
  const auto whole = checkpoint_testing::global_state(attempt.number);
  run_local_ranks(kRanks, [&](const std::shared_ptr<Communicator>& comm) {
    CheckpointManager(folder, kKeepTwo, comm, fs)
        .save(checkpoint_testing::hold_state(whole, three_rows(), comm->rank()), attempt.step);
  });
}

class InterruptedShardedSave : public testing::TestWithParam<Fault> {};

TEST_P(InterruptedShardedSave, LeavesALoadableFolderAtEveryOperation) {
  const TempDirectory original("interrupted-sharded");
  save_three_ranks(original.path(), {1, 1}, posix_file_system());
  save_three_ranks(original.path(), {2, 2}, posix_file_system());
  const Attempt attempt{3, 5};
  std::int64_t operations = 1;
  bool seen_old = false, seen_new = false;
  for (std::int64_t n = -1; n < operations; ++n) {  // the first run, without a failure, counts them
    SCOPED_TRACE(testing::Message() << "operation " << n << " of " << operations);
    const TempDirectory scratch("interrupted-sharded");
    std::filesystem::copy(original.path(), scratch.path(), std::filesystem::copy_options::recursive);
    FaultyFileSystem fs(posix_file_system(),
                        {.fail_at = n < 0 ? std::numeric_limits<std::int64_t>::max() : n, .kind = GetParam()});
    bool reported_saved = true;
    try {
      save_three_ranks(scratch.path(), attempt, fs);
    } catch (const std::exception& error) {
      reported_saved = false;
      EXPECT_THAT(error.what(), AnyOf(HasSubstr("cannot save checkpoint"), HasSubstr("crash")));
    }
    if (n < 0) operations = fs.operations();
    // It is loaded in another layout: as one rank.
    auto state = checkpoint_testing::global_state(0);
    const auto loaded = CheckpointManager(scratch.path()).load_latest(state);
    ASSERT_TRUE(loaded);
    const bool is_new = loaded->step == attempt.step;
    EXPECT_TRUE(same_state(state, checkpoint_testing::global_state(is_new ? attempt.number : 2)));
    EXPECT_TRUE(is_new || (!reported_saved && loaded->step == 2));
    (is_new ? seen_new : seen_old) = true;
    save_three_ranks(scratch.path(), {9, 9}, posix_file_system());
    for (const auto& entry : std::filesystem::directory_iterator(scratch.path()))
      EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
  }
  EXPECT_GE(operations, kRanks * 4 + 8);
  EXPECT_TRUE(seen_old && seen_new);
}

INSTANTIATE_TEST_SUITE_P(Faults, InterruptedShardedSave, testing::Values(Fault::error, Fault::full, Fault::crash));

constexpr int kProgressFile = 3;  // the process to be killed writes its finished steps here

// What the killed process does: the test below starts this binary again for it, as threads and fork do not mix.
TEST(KilledShardedSave, DISABLED_SavesStepAfterStepUntilKilled) {
  const char *folder = std::getenv("PHALANX_TEST_FOLDER"), *first = std::getenv("PHALANX_TEST_FIRST_STEP");
  ASSERT_TRUE(folder != nullptr && first != nullptr);
  for (std::int64_t step = std::atoll(first);; ++step) {
    save_three_ranks(folder, {step, step}, posix_file_system());
    ASSERT_EQ(::write(kProgressFile, &step, sizeof step), static_cast<ssize_t>(sizeof step));
  }
}

/// Starts it with its progress in the pipe; it dies with this process.
pid_t start_saving(const std::filesystem::path& folder, std::int64_t first_step, const int (&pipe)[2]) {
  const std::string environment[] = {"PHALANX_TEST_FOLDER=" + folder.string(),
                                     "PHALANX_TEST_FIRST_STEP=" + std::to_string(first_step), "OMP_NUM_THREADS=1"};
  const char* arguments[] = {"checkpoint_test", "--gtest_also_run_disabled_tests", "--gtest_brief=1",
                             "--gtest_filter=KilledShardedSave.DISABLED_*", nullptr};
  const char* variables[] = {environment[0].c_str(), environment[1].c_str(), environment[2].c_str(), nullptr};
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::close(STDOUT_FILENO);
  if (pipe[1] != kProgressFile) ::dup2(pipe[1], kProgressFile);
  for (int file = kProgressFile + 1; file <= std::max(pipe[0], pipe[1]); ++file) ::close(file);
  ::execve("/proc/self/exe", const_cast<char**>(arguments), const_cast<char**>(variables));
  ::_exit(127);
}

TEST(KilledShardedSave, EveryFinishedCheckpointSurvivesSigkillAtAnyMoment) {
  const TempDirectory scratch("killed-sharded");
  std::mt19937 random(21);
  std::int64_t last = 0;
  for (int kill = 0; kill < 2; ++kill) {
    int pipe[2];
    ASSERT_EQ(::pipe(pipe), 0);
    const pid_t child = start_saving(scratch.path(), last + 1, pipe);
    ASSERT_GT(child, 0);
    ::close(pipe[1]);
    const std::int64_t finished = kill_at_random(child, pipe[0], random);
    EXPECT_GT(finished, last);
    auto state = checkpoint_testing::global_state(0);
    const auto loaded = CheckpointManager(scratch.path()).load_latest(state);
    ASSERT_TRUE(loaded);
    EXPECT_GE(loaded->step, finished);
    EXPECT_TRUE(same_state(state, checkpoint_testing::global_state(loaded->step)));
    last = loaded->step;
  }
}

}  // namespace
}  // namespace phalanx
