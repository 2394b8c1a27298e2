// Saving processes are killed with SIGKILL at every file operation of a save, also with half of a write written: all
// ranks together, or one rank while the others live. After each kill the folder must give the newest complete step,
// bit for bit, and accept the next save. For kills at random moments see interrupted_save_test.cc.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/testing/sharded_state.h"
#include "phalanx/checkpoint/testing/test_state.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using checkpoint_testing::same_state;

constexpr CheckpointOptions kKeepTwoSteps{.keep_latest_k = 2};
constexpr int kAllRanks = -1;

checkpoint_testing::Layout rows_of_three() { return checkpoint_testing::layouts()[4]; }

/// Every rank holds more than one block of it, so that its file is written in several pieces.
TrainState several_blocks(std::int64_t number) {
  auto state = checkpoint_testing::global_state(number);
  state.tensors.push_back({"model.large.weight", checkpoint_testing::counted({900, 1000}, number)});
  return state;
}

TrainState part_of(std::int64_t number, int rank) {
  return checkpoint_testing::hold_state(several_blocks(number), rows_of_three(), rank);
}

/// What a rank does in a folder that has steps 1 and 2. For step N it saves the state of number 10 + N.
struct SaverScript {
  std::string name;
  std::function<void(CheckpointManager&, int rank)> run;
  std::size_t first_operation = 0;  // where not all are tried
};

std::vector<SaverScript> saver_scripts() {
  return {{"NewStep", [](CheckpointManager& to, int rank) { to.save(part_of(13, rank), 3); }, 0},
          {"ReplacedStep", [](CheckpointManager& to, int rank) { to.save(part_of(12, rank), 2); }, 1},
          {"TwoInTheBackground",
           [](CheckpointManager& to, int rank) {
             auto state = part_of(13, rank);
             to.async_save(state, 3);
             for (auto& named : state.tensors) named.tensor.fill_(-1);  // training continues
             to.async_save(part_of(14, rank), 4);
             to.finish();
           },
           2}};
}

/// Runs the ranks as threads; fs(rank) is where each writes.
void run_as_threads(const SaverScript& script, const std::filesystem::path& folder,
                    const std::function<FileSystem&(int rank)>& fs) {
  run_local_ranks(rows_of_three().world, [&](const std::shared_ptr<Communicator>& comm) {
    CheckpointManager checkpoints(folder, kKeepTwoSteps, comm, fs(comm->rank()));
    script.run(checkpoints, comm->rank());
  });
}

FileSystem& real_files(int) { return posix_file_system(); }

void fill_with_two_steps(const std::filesystem::path& folder) {
  static const TempDirectory original("killed-original");
  if (std::filesystem::is_empty(original.path())) {
    for (const std::int64_t step : {1, 2})
      run_as_threads({"", [&](CheckpointManager& to, int rank) { to.save(part_of(step, rank), step); }},
                     original.path(), real_files);
  }
  std::filesystem::copy(original.path(), folder, std::filesystem::copy_options::recursive);
}

/// The file operations of a save without a kill: those of all ranks (numbered as they come), or of one rank.
std::vector<std::string> operations_of(const SaverScript& script, int victim) {
  const TempDirectory scratch("killed-count");
  fill_with_two_steps(scratch.path());
  FaultyFileSystem counted(posix_file_system());
  run_as_threads(script, scratch.path(), [&](int rank) -> FileSystem& {
    return victim == kAllRanks || rank == victim ? counted : posix_file_system();
  });
  return counted.journal();
}

/// The number of the state that must be found if operation n of these did not happen: that of the last rename that
/// puts a step in place. A rank without renames (not rank 0) creates a file when the previous step is in place.
std::int64_t number_in_place(const std::vector<std::string>& operations, std::size_t n, int victim) {
  std::int64_t number = 2;
  for (std::size_t i = 0; i < n; ++i)
    for (const std::int64_t step : {2, 3, 4})
      if (operations[i] == fmt::format("rename step-{0}.tmp -> step-{0}", step)) number = 10 + step;
  const auto begun = std::count_if(operations.begin(), operations.begin() + static_cast<std::ptrdiff_t>(n) + 1,
                                   [](const std::string& operation) { return operation.starts_with("create "); });
  return victim > 0 && begun == 2 ? 13 : number;
}

/// All ranks are threads of one process, which is killed.
std::string kill_the_process(const SaverScript& script, const std::filesystem::path& folder, std::int64_t at) {
  return run_forked_ranks(
      1,
      [&](int) {
        FaultyFileSystem fs(posix_file_system(), {.fail_at = at, .kind = Fault::kill});
        run_as_threads(script, folder, [&](int) -> FileSystem& { return fs; });
      },
      0);
}

/// Ranks are processes over shared memory, and one of them is killed. The others get an error that names it, at the
/// latest in their next operation.
std::string kill_one_rank(const SaverScript& script, const std::filesystem::path& folder, std::int64_t at, int victim) {
  const TcpStoreServer server;
  const int world = rows_of_three().world;
  return run_forked_ranks(
      world,
      [&](int rank) {
        TcpStore store(server.address());
        const auto comm = make_shm_communicator(store, rank, world);
        FaultyFileSystem fs(
            posix_file_system(),
            {.fail_at = rank == victim ? at : std::numeric_limits<std::int64_t>::max(), .kind = Fault::kill});
        std::string message = "no error";
        try {
          CheckpointManager checkpoints(folder, kKeepTwoSteps, comm, fs);
          script.run(checkpoints, rank);
          comm->barrier();
        } catch (const CommError& error) {
          message = error.what();
        }
        if (message.find(fmt::format("rank {}", victim)) == std::string::npos)
          throw std::runtime_error("of the death it says: " + message);
      },
      victim);
}

/// A kill of all ranks is tried at every operation of one save. Of two saves, and of one rank in a world of processes,
/// which takes 0.2 s, every third operation is tried, starting at another one for each script, unless all are asked for
/// (make kills).
std::size_t operations_apart(const SaverScript& script, int victim) {
  const bool is_quick = victim == kAllRanks && script.name != "TwoInTheBackground";
  return is_quick || takes_all_cases() ? 1 : 3;
}

class KilledAtEveryOperation : public testing::TestWithParam<std::tuple<SaverScript, int>> {};

TEST_P(KilledAtEveryOperation, TheNewestCompleteStepIsFoundAndTheNextSaveWorks) {
  const auto& [script, victim] = GetParam();
  const auto operations = operations_of(script, victim);
  // A shard file is created, written in two pieces, synced and closed.
  ASSERT_GE(operations.size(), victim == kAllRanks ? 25u : victim == 0 ? 15u : 5u);
  const auto apart = operations_apart(script, victim);
  for (std::size_t n = apart == 1 ? 0 : script.first_operation; n < operations.size(); n += apart) {
    SCOPED_TRACE(testing::Message() << "killed at operation " << n << " of " << operations.size() << ": "
                                    << operations[n]);
    const TempDirectory scratch("killed");
    fill_with_two_steps(scratch.path());
    const auto at = static_cast<std::int64_t>(n);
    EXPECT_EQ(victim == kAllRanks ? kill_the_process(script, scratch.path(), at)
                                  : kill_one_rank(script, scratch.path(), at, victim),
              "");
    // It is loaded in another layout: as one rank.
    auto state = several_blocks(0);
    const auto loaded = CheckpointManager(scratch.path()).load_latest(state);
    ASSERT_TRUE(loaded);
    const auto number = number_in_place(operations, n, victim);
    EXPECT_TRUE(same_state(state, several_blocks(number)));
    EXPECT_EQ(loaded->step, number == 2 ? 2 : number - 10);
    // A step gets its name only when it is complete: no step was skipped because a file is missing or incomplete.
    EXPECT_TRUE(list_checkpoints(scratch.path()).damaged.empty());
    run_as_threads({"", [](CheckpointManager& to, int rank) { to.save(part_of(19, rank), 9); }}, scratch.path(),
                   real_files);
    for (const auto& entry : std::filesystem::directory_iterator(scratch.path()))
      EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
    ASSERT_EQ(CheckpointManager(scratch.path()).load_latest(state)->step, 9);
    EXPECT_TRUE(same_state(state, several_blocks(19)));
  }
}

INSTANTIATE_TEST_SUITE_P(Saves, KilledAtEveryOperation,
                         testing::Combine(testing::ValuesIn(saver_scripts()), testing::Values(kAllRanks, 0, 1, 2)),
                         [](const auto& info) {
                           const int victim = std::get<1>(info.param);
                           return std::get<0>(info.param).name +
                                  (victim == kAllRanks ? "AllRanks" : fmt::format("Rank{}", victim));
                         });

}  // namespace
}  // namespace phalanx
