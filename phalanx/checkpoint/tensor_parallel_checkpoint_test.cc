// A Llama that tensor-parallel ranks have trained is saved from their parts and continues under other layouts.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/models/llama_parallel.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/fsdp/fully_shard.h"

namespace phalanx {
namespace {

struct SplitLayout {
  int dp = 1, tp = 1;
  bool sharded = false;  // over dp, which is replicated otherwise: every rank has the same tokens here
};

/// Trains from `first` to `last`, from a checkpoint if there is one, and saves. The last step's loss.
double continue_run(const std::filesystem::path& folder, const SplitLayout& layout, int first, int last) {
  double result = 0;
  run_local_ranks(layout.dp * layout.tp, [&](const std::shared_ptr<Communicator>& world) {
    const DeviceMesh mesh(world, {{"dp_shard", layout.dp}, {"tp", layout.tp}});
    // Four ranks have more of them than key and value heads.
    models::Llama model({.dim = 32, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .ffn_hidden = 48, .vocab_size = 64},
                        {.without_memory = true});
    models::parallelize_llama(model, mesh);
    std::unique_ptr<FullyShardedDataParallel> sharded;
    if (layout.sharded) {
      sharded = std::make_unique<FullyShardedDataParallel>(model, mesh);
      sharded->initialise(1);
    } else {
      nn::initialise(model, 1);
    }
    const auto parameters = sharded ? sharded->parameters() : nn::named_parameters(model);
    AdamW optimizer(parameters);
    TrainState state{with_prefix("model.", parameters), {}};
    optimizer.collect_state(state);
    CheckpointManager checkpoints(folder, {}, world);
    if (first > 0) {
      EXPECT_TRUE(checkpoints.load_latest(state));
      if (sharded) sharded->invalidate_unsharded();
    }
    for (int step = first; step < last; ++step) {
      const at::Tensor tokens = at::arange(18, at::kLong).add(step).mul(5).remainder(61).view({2, 9});
      const at::Tensor loss = model.loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
      loss.backward();
      optimizer.step(5e-3);
      optimizer.zero_grad();
      if (world->rank() == 0) result = loss.item<double>();
    }
    checkpoints.save(state, last);
  });
  return result;
}

TEST(TensorParallelCheckpoint, ContinuesUnderOtherLayouts) {
  const TempDirectory whole("whole");
  const double expected = continue_run(whole.path(), {}, 0, 6);
  const std::vector<SplitLayout> layouts = {
      {.tp = 2}, {.tp = 4}, {}, {.dp = 2, .sharded = true}, {.dp = 2, .tp = 2, .sharded = true}};
  for (const auto& saved : layouts) {
    for (const auto& loaded : layouts) {
      SCOPED_TRACE(::testing::Message() << "saved by dp " << saved.dp << " tp " << saved.tp << ", loaded by dp "
                                        << loaded.dp << " tp " << loaded.tp);
      const TempDirectory folder("split");
      continue_run(folder.path(), saved, 0, 3);
      EXPECT_NEAR(continue_run(folder.path(), loaded, 3, 6), expected, 1e-5 * expected);
    }
  }
}

}  // namespace
}  // namespace phalanx
