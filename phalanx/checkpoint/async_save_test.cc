// Saves that continue in the background.
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

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

using checkpoint_testing::global_state;
using checkpoint_testing::hold_state;
using checkpoint_testing::make_state;
using checkpoint_testing::same_state;

/// A gate that opens once; threads that wait for it then continue.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

/// A file system on which no file can be created before the gate is open.
class GatedFileSystem final : public FileSystem {
 public:
  explicit GatedFileSystem(Gate& gate) : gate_(gate) {}
  std::unique_ptr<WritableFile> create(const std::filesystem::path& path) override {
    gate_.wait();
    return below_.create(path);
  }
  std::unique_ptr<WritableFile> append(const std::filesystem::path& path) override { return below_.append(path); }
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override { below_.rename(from, to); }
  void make_directory(const std::filesystem::path& path) override { below_.make_directory(path); }
  void remove(const std::filesystem::path& path) override { below_.remove(path); }
  void remove_all(const std::filesystem::path& path) override { below_.remove_all(path); }
  void sync_directory(const std::filesystem::path& path) override { below_.sync_directory(path); }

 private:
  Gate& gate_;
  FileSystem& below_ = posix_file_system();
};

TEST(AsyncSave, SavesTheStateAsItWasHoweverItChangesMeanwhile) {
  const TempDirectory scratch("async");
  const auto rows = checkpoint_testing::layouts()[6];  // 4 ranks
  Gate gate;
  GatedFileSystem fs(gate);
  run_local_ranks(rows.world, [&](const std::shared_ptr<Communicator>& comm) {
    CheckpointManager checkpoints(scratch.path(), {}, comm, fs);
    auto state = hold_state(global_state(3), rows, comm->rank());
    checkpoints.reserve(state);
    EXPECT_FALSE(checkpoints.finish());
    EXPECT_FALSE(checkpoints.is_saving());
    const auto started = checkpoints.async_save(state, 30, R"({"a":1})");
    EXPECT_EQ(started.path, scratch.path() / "step-30");
    EXPECT_GE(started.stall_seconds, 0);
    EXPECT_GT(started.bytes, 0u);
    EXPECT_TRUE(checkpoints.is_saving());
    for (auto& named : state.tensors) named.tensor.fill_(-1);  // training continues, and uses its communicator
    for (int i = 0; i < 3; ++i) comm->barrier();
    state.integers["step"] = -1;
    if (comm->rank() == 0) gate.open();
    const auto saved = checkpoints.finish();
    ASSERT_TRUE(saved);
    EXPECT_EQ(saved->path, started.path);
    const auto loaded = checkpoints.load_latest(state);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->metadata, R"({"a":1})");
    EXPECT_TRUE(same_state(state, hold_state(global_state(3), rows, comm->rank())));
  });
}

TEST(AsyncSave, OneFollowsTheOtherInTheSameBuffer) {
  const TempDirectory scratch("async");
  {
    CheckpointManager checkpoints(scratch.path(), {.keep_latest_k = 2});
    for (int step = 1; step <= 5; ++step) checkpoints.async_save(make_state(step, step == 3 ? 100 : 7), step);
    checkpoints.save(make_state(6), 6);
    checkpoints.async_save(make_state(7), 7);
  }  // waits
  auto state = make_state(0);
  EXPECT_EQ(CheckpointManager(scratch.path()).load_latest(state)->step, 7);
  EXPECT_TRUE(same_state(state, make_state(7)));
  EXPECT_EQ(CheckpointManager(scratch.path()).load(scratch.path() / "step-6", state).step, 6);
  EXPECT_FALSE(std::filesystem::exists(scratch.path() / "step-5"));
}

TEST(AsyncSave, AFailureOfTheBackgroundReachesTheNextCallOfEveryRank) {
  constexpr int kRanks = 3;
  const auto state_of = [](int rank) { return hold_state(global_state(2), checkpoint_testing::layouts()[4], rank); };
  for (const int call : {0, 1, 2, 3}) {
    SCOPED_TRACE(call);
    const TempDirectory scratch("async");
    run_local_ranks(kRanks, [&](const std::shared_ptr<Communicator>& comm) {
      // Rank 1's second operation, of the second save, fails: writing its file.
      FaultyFileSystem fs(posix_file_system(), {.fail_at = comm->rank() == 1 ? 5 : 1000, .kind = Fault::error});
      CheckpointManager checkpoints(scratch.path(), {}, comm, fs);
      auto state = state_of(comm->rank());
      checkpoints.async_save(state, 1);
      checkpoints.async_save(state, 2);
      const auto message = error_text<CheckpointError>([&] {
        if (call == 0) checkpoints.finish();
        if (call == 1) checkpoints.async_save(state, 3);
        if (call == 2) checkpoints.save(state, 3);
        if (call == 3) checkpoints.load_latest(state);
      });
      EXPECT_THAT(message, AllOf(HasSubstr("cannot save checkpoint"), HasSubstr("step-2"), HasSubstr("rank 1: "),
                                 HasSubstr("Input/output error")));
      // The error has been thrown, and the call did nothing else. The next call works.
      EXPECT_FALSE(checkpoints.finish());
      EXPECT_FALSE(std::filesystem::exists(scratch.path() / "step-2"));
      EXPECT_EQ(checkpoints.load_latest(state)->step, 1);
      checkpoints.async_save(state, 4);
      EXPECT_TRUE(checkpoints.finish());
    });
  }
}

TEST(AsyncSave, WhatCannotBeSavedIsSaidAtOnce) {
  const TempDirectory scratch("async");
  CheckpointManager checkpoints(scratch.path());
  auto state = make_state(1);
  state.tensors[2].tensor = at::Tensor();
  EXPECT_THAT(error_text<CheckpointError>([&] { checkpoints.async_save(state, 1); }), HasSubstr("is undefined"));
  EXPECT_FALSE(checkpoints.finish());
}

TEST(AsyncSave, AFailureThatNobodyAsksForIsLogged) {
  const TempDirectory scratch("async");
  testing::internal::CaptureStderr();
  {
    FaultyFileSystem fs(posix_file_system(), {.fail_at = 3, .kind = Fault::full});
    CheckpointManager checkpoints(scratch.path(), {}, nullptr, fs);
    checkpoints.async_save(make_state(1), 1);
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("cannot save checkpoint"), HasSubstr("No space left")));
}

}  // namespace
}  // namespace phalanx
