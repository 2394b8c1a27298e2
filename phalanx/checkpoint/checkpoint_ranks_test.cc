// Checkpoints written and read by several ranks.
#include <gtest/gtest.h>

#include <atomic>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/testing/test_state.h"
#include "phalanx/comm/backends/local_shm/local.h"

namespace phalanx {
namespace {

using checkpoint_testing::make_state;
using checkpoint_testing::same_state;

void save_with_ranks(int world_size, const std::filesystem::path& folder, std::int64_t number, std::int64_t step) {
  run_local_ranks(world_size, [&](const std::shared_ptr<Communicator>& comm) {
    CheckpointManager(folder, {}, comm).save(make_state(number), step);
  });
}

TEST(CheckpointRanks, AnyNumberOfRanksLoadsWhatAnyOtherSaved) {
  for (const int savers : {1, 2, 3, 8}) {
    const TempDirectory scratch("ranks");
    save_with_ranks(savers, scratch.path(), 4, 40);
    const auto files = CheckpointReader(scratch.path() / "step-40").manifest().files;
    EXPECT_EQ(files.size(), static_cast<std::size_t>(savers));
    for (const int loaders : {1, 2, 3}) {
      run_local_ranks(loaders, [&](const std::shared_ptr<Communicator>& comm) {
        auto state = make_state(0);
        const auto loaded = CheckpointManager(scratch.path(), {}, comm).load_latest(state);
        ASSERT_TRUE(loaded);
        EXPECT_EQ(loaded->step, 40);
        EXPECT_TRUE(same_state(state, make_state(4)));
      });
    }
  }
}

TEST(CheckpointRanks, RanksShareTheBytes) {
  const TempDirectory scratch("ranks");
  run_local_ranks(4, [&](const std::shared_ptr<Communicator>& comm) {
    CheckpointManager(scratch.path(), {}, comm).save(make_state(4, 20'000), 1);
  });
  const auto files = CheckpointReader(scratch.path() / "step-1").manifest().files;
  ASSERT_EQ(files.size(), 4u);
  for (const auto& file : files) EXPECT_NEAR(static_cast<double>(file.size), 200'000, 2'000) << file.name;
}

TEST(CheckpointRanks, AFailureOnOneRankFailsTheSaveOnAllAndKeepsThePrevious) {
  // Whatever operation of rank 1 fails: creating, writing or syncing its file.
  for (std::int64_t n = 0; n < 3; ++n) {
    const TempDirectory scratch("ranks");
    save_with_ranks(3, scratch.path(), 1, 1);
    std::atomic<int> failed{0};
    run_local_ranks(3, [&](const std::shared_ptr<Communicator>& comm) {
      FaultyFileSystem fs(posix_file_system(), {.fail_at = comm->rank() == 1 ? n : 1000, .kind = Fault::full});
      CheckpointManager checkpoints(scratch.path(), {}, comm, fs);
      const auto message = error_text<CheckpointError>([&] { checkpoints.save(make_state(2), 2); });
      EXPECT_THAT(message, AllOf(HasSubstr("rank 1: "), HasSubstr("No space left"), HasSubstr("step-2")));
      failed += message.empty() ? 0 : 1;
      auto state = make_state(0);
      ASSERT_TRUE(checkpoints.load_latest(state));
      EXPECT_TRUE(same_state(state, make_state(1)));
    });
    EXPECT_EQ(failed, 3);
  }
}

TEST(CheckpointRanks, DifferentStatesAreNotSavedTogether) {
  const TempDirectory scratch("ranks");
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    CheckpointManager checkpoints(scratch.path(), {}, comm);
    auto state = make_state(1);
    state.integers["data.position"] += comm->rank();
    EXPECT_THAT(error_text<CheckpointError>([&] { checkpoints.save(state, 1); }), HasSubstr("rank 1 and rank 0"));
    EXPECT_FALSE(checkpoints.load_latest(state));
  });
}

TEST(CheckpointRanks, AMismatchOnOneRankIsAnErrorOnAll) {
  const TempDirectory scratch("ranks");
  save_with_ranks(2, scratch.path(), 1, 1);
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    CheckpointManager checkpoints(scratch.path(), {}, comm);
    auto state = make_state(0);
    if (comm->rank() == 1) state.tensors.pop_back();
    EXPECT_THAT(error_text<CheckpointError>([&] { checkpoints.load_latest(state); }),
                AllOf(HasSubstr("rank 1: "), HasSubstr("\"counts\" is unexpected")));
  });
}

// Ranks whose folders differ: the same step of two runs, with the same shapes.
TEST(CheckpointRanks, AnotherCheckpointOnOneRankIsAnErrorOnAllBeforeAnythingIsRead) {
  const TempDirectory first("ranks"), second("ranks");
  save_with_ranks(2, first.path(), 4, 40);
  save_with_ranks(2, second.path(), 5, 40);
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    auto state = make_state(0);
    CheckpointManager checkpoints(comm->rank() == 1 ? second.path() : first.path(), {}, comm);
    EXPECT_THAT(error_text<CheckpointError>([&] { checkpoints.load_latest(state); }),
                AllOf(HasSubstr("step-40 is another one on rank 1 than on rank 0"),
                      HasSubstr("one folder that all ranks share")));
    EXPECT_TRUE(same_state(state, make_state(0)));
  });
}

TEST(CheckpointRanks, DamageMakesAllRanksTakeTheSameOlderOne) {
  const TempDirectory scratch("ranks");
  save_with_ranks(2, scratch.path(), 1, 1);
  save_with_ranks(2, scratch.path(), 2, 2);
  const auto file = scratch.path() / "step-2" / "shard-00002-model-00001-of-00001.safetensors";
  auto bytes = read_file(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(file, bytes);
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    auto state = make_state(0);
    const auto loaded = CheckpointManager(scratch.path(), {}, comm).load_latest(state);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->step, 1);
    EXPECT_TRUE(same_state(state, make_state(1)));
  });
}

}  // namespace
}  // namespace phalanx
