// Asynchronous saves of what lies on a device: copied in the order of its stream, without a wait of the host.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/staging_buffer.h"
#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::StartsWith;

class AsyncSaveOnSim : public SimTest {
 protected:
  AsyncSaveOnSim() { sim.runtime.set_delays({.longest = std::chrono::microseconds(300), .seed = 7}); }

  TempDirectory folder_{"async_save_on_sim"};
};

TEST_F(AsyncSaveOnSim, HasTheValuesOfItsMomentAndTheHostDoesNotWait) {
  const at::Tensor weight = at::ones({64, 32}, on_sim()), narrow = at::full({5, 3}, 2.0, on_sim().dtype(at::kBFloat16)),
                   on_host = at::full({7}, 3.0);
  const TrainState state{.tensors = {{"weight", weight.t()}, {"narrow", narrow}, {"on_host", on_host}}, .integers = {}};
  CheckpointManager checkpoints(folder_.path());
  checkpoints.reserve(state);
  for (const int step : {1, 2}) {
    sim.runtime.host_waits().clear();
    checkpoints.async_save(state, step);
    weight.add_(step);
    narrow.fill_(100);
    on_host.fill_(100);
    const auto saved = checkpoints.finish();
    ASSERT_TRUE(saved);
    // The writing thread's. A copy that waits has another cause.
    EXPECT_THAT(sim.runtime.host_waits().by_site(), ElementsAre(Pair(StartsWith("synchronize an event, "), 1)));

    TrainState read{.tensors = {{"weight", at::zeros({32, 64})},
                                {"narrow", at::zeros({5, 3}, at::kBFloat16)},
                                {"on_host", at::zeros({7})}},
                    .integers = {}};
    CheckpointManager(folder_.path()).load(saved->path, read);
    EXPECT_TRUE(at::equal(read.tensors[0].tensor, at::full({32, 64}, step))) << step;
    EXPECT_TRUE(at::equal(read.tensors[1].tensor, at::full({5, 3}, step == 1 ? 2 : 100, at::kBFloat16))) << step;
    EXPECT_TRUE(at::equal(read.tensors[2].tensor, at::full({7}, step == 1 ? 3 : 100))) << step;
  }
}

// More than a block of pinned memory, in boxes that do not fill it.
TEST_F(AsyncSaveOnSim, LargeStatesHaveSeveralBlocks) {
  constexpr std::int64_t kRows = 3 << 10, kColumns = 8 << 10;  // 96 MiB
  std::vector<NamedTensor> tensors;
  std::vector<WriteItem> boxes;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back({"w" + std::to_string(i), at::full({kRows, kColumns}, i + 1, on_sim())});
    boxes.push_back({.tensor = static_cast<std::size_t>(i), .box = {}, .row_begin = i, .row_end = kRows});
  }
  StagingBuffer buffer;
  const StagedBoxes staged = buffer.copy(tensors, boxes);
  staged.await_copies();
  ASSERT_EQ(staged.tensors.size(), 4);
  for (int i = 0; i < 4; ++i) {
    const at::Tensor& copy = staged.tensors[static_cast<std::size_t>(i)].tensor;
    EXPECT_TRUE(copy.is_pinned());
    EXPECT_TRUE(at::equal(copy, at::full({kRows - i, kColumns}, i + 1))) << i;
  }
  EXPECT_FALSE(staged.tensors[1].tensor.is_alias_of(staged.tensors[2].tensor));
}

TEST_F(AsyncSaveOnSim, AStateMayLieOnTwoDevices) {
  const std::vector<NamedTensor> tensors = {{"a", at::ones({64}, on_sim(0)).add_(1)},
                                            {"b", at::ones({64}, on_sim(1)).add_(2)}};
  StagingBuffer buffer;
  const StagedBoxes staged = buffer.copy(tensors, {{.tensor = 0, .box = {}, .row_begin = 0, .row_end = 64},
                                                   {.tensor = 1, .box = {}, .row_begin = 0, .row_end = 64}});
  EXPECT_EQ(staged.copied.size(), 2);
  staged.await_copies();
  EXPECT_EQ(staged.tensors[0].tensor[63].item<float>(), 2);
  EXPECT_EQ(staged.tensors[1].tensor[63].item<float>(), 3);
}

TEST_F(AsyncSaveOnSim, ADeviceThatFailsEndsTheSaveOfOneRankToo) {
  const TrainState state{.tensors = {{"weight", at::ones({64, 32}, on_sim())}}, .integers = {}};
  CheckpointManager checkpoints(folder_.path());
  sim.runtime.launch({0, 0}, {"broken", {}, [] { throw std::runtime_error("an illegal address"); }});
  EXPECT_THAT(error_text([&] {
                checkpoints.async_save(state, 5);
                checkpoints.finish();
              }),
              AllOf(HasSubstr("step-5"), HasSubstr("copied from its device"), HasSubstr("an illegal address")));
  sim.runtime.clear_failure(0);
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "step-5.tmp"));
}

TEST_F(AsyncSaveOnSim, ADeviceThatFailsIsAnErrorOnAllRanks) {
  std::vector<std::string> errors(2);
  run_sim_ranks(2, /*over_nccl=*/false, [&](const std::shared_ptr<Communicator>& world) {
    const int rank = world->rank();
    const TrainState state{.tensors = {{"weight", at::ones({64, 32}, on_sim(rank))}}, .integers = {}};
    CheckpointManager checkpoints(folder_.path(), {}, world);
    if (rank == 1) sim.runtime.launch({1, 0}, {"broken", {}, [] { throw std::runtime_error("an illegal address"); }});
    errors[static_cast<std::size_t>(rank)] = error_text([&] {
      checkpoints.async_save(state, 5);
      checkpoints.finish();
    });
  });
  sim.runtime.clear_failure(1);
  EXPECT_THAT(errors[0], AllOf(HasSubstr("step-5"), HasSubstr("rank 1"), HasSubstr("an illegal address")));
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "step-5"));
}

}  // namespace
}  // namespace phalanx
