// A sharded run whose parameters are float32 resumes with bfloat16 parameters and their float32 masters, and vice
// versa.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/remainder.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx {
namespace {

const models::LlamaConfig kShape{
    .dim = 32, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .ffn_hidden = 48, .vocab_size = 64};

struct ShardedRun {
  ShardedRun(const std::shared_ptr<Communicator>& world, at::ScalarType dtype)
      : model(kShape, {.dtype = dtype, .without_memory = true}),
        sharded(model, DeviceMesh(world, {{"dp_shard", world->size()}})) {
    sharded.initialise(1);
    optimizer = std::make_unique<AdamW>(sharded.parameters());
    state.tensors = with_prefix("model.", sharded.parameters());
    optimizer->collect_state(state);
  }
  void train(int steps, double lr) {
    for (int step = 0; step < steps; ++step) {
      const at::Tensor tokens = at::arange(18, at::kLong).add(step).mul(5).remainder(61).view({2, 9});
      model.loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8)).backward();
      optimizer->step(lr);
      optimizer->zero_grad();
    }
  }
  models::Llama model;
  FullyShardedDataParallel sharded;
  std::unique_ptr<AdamW> optimizer;
  TrainState state;
};

void run_sharded(int ranks, at::ScalarType dtype,
                 const std::function<void(ShardedRun& run, const std::shared_ptr<Communicator>& world)>& body) {
  run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
    ShardedRun run(world, dtype);
    body(run, world);
  });
}

using Values = std::map<std::string, at::Tensor>;

/// The contents of a folder's newest checkpoint, in the dtypes they were saved in.
Values whole_values(const std::filesystem::path& folder, at::ScalarType dtype) {
  const models::Llama model(kShape, {.dtype = dtype});
  const auto parameters = nn::named_parameters(model);
  const AdamW optimizer(parameters);
  TrainState state{with_prefix("model.", parameters), {}};
  optimizer.collect_state(state);
  EXPECT_TRUE(CheckpointManager(folder).load_latest(state));
  Values values;
  for (const auto& [name, tensor, shard] : state.tensors) values[name] = tensor.detach();
  return values;
}

/// This rank's part of what it should be.
void expect_values(const NamedTensor& found, const at::Tensor& expected) {
  const at::Tensor part =
      found.shard ? expected.narrow(0, found.shard->box().offsets[0], found.shard->box().shape[0]) : expected;
  EXPECT_EQ(found.tensor.scalar_type(), expected.scalar_type()) << found.name;
  EXPECT_TRUE(at::equal(found.tensor.detach(), part)) << found.name;
}

/// Loads without the option; the state is unchanged.
void expect_refused(CheckpointManager&& checkpoints, TrainState state, const std::string& expected,
                    const std::string& found) {
  // Only the first few differences are listed.
  std::ranges::stable_partition(state.tensors, [](const auto& one) { return one.name == "model.norm.weight"; });
  const at::Tensor before = state.tensors.front().tensor.detach().clone();
  EXPECT_THAT(error_text<CheckpointError>([&] { checkpoints.load_latest(state); }),
              AllOf(HasSubstr("\"model.norm.weight\": expected " + expected + " [32], found " + found),
                    HasSubstr("convert_dtype = true")));
  EXPECT_TRUE(at::equal(state.tensors.front().tensor.detach(), before));
}

TEST(ConvertedState, Float32GoesIntoBfloat16AndItsMasters) {
  const TempDirectory wide("wide");
  run_sharded(2, at::kFloat, [&](ShardedRun& run, const auto& world) {
    run.train(3, 5e-3);
    CheckpointManager(wide.path(), {}, world).save(run.state, 3);
  });
  const Values saved = whole_values(wide.path(), at::kFloat);
  for (const int ranks : {1, 2, 3}) {
    const TempDirectory narrow("narrow");
    run_sharded(ranks, at::kBFloat16, [&](ShardedRun& run, const auto& world) {
      expect_refused(CheckpointManager(wide.path(), {}, world), run.state, "BF16", "F32");
      EXPECT_TRUE(CheckpointManager(wide.path(), {.convert_dtype = true}, world).load_latest(run.state));
      run.sharded.invalidate_unsharded();
      for (const NamedTensor& one : run.state.tensors) {
        if (one.name.starts_with("model.")) {
          expect_values(one, saved.at(one.name).to(at::kBFloat16));
        } else if (const std::string parameter = parameter_of_master(one.name); !parameter.empty()) {
          expect_values(one, saved.at(parameter));
        } else {
          expect_values(one, saved.at(one.name));
        }
      }
      CheckpointManager(narrow.path(), {}, world).save(run.state, 3);
      // The masters were not replaced by rounded values.
      run.train(1, 0);
      for (const NamedTensor& one : run.state.tensors) {
        if (const std::string parameter = parameter_of_master(one.name); !parameter.empty()) {
          expect_values(one, saved.at(parameter));
        }
      }
    });
    // And back: not a bit was lost.
    run_sharded(2, at::kFloat, [&](ShardedRun& run, const auto& world) {
      EXPECT_TRUE(CheckpointManager(narrow.path(), {.convert_dtype = true}, world).load_latest(run.state));
      for (const NamedTensor& one : run.state.tensors) expect_values(one, saved.at(one.name));
    });
  }
}

TEST(ConvertedState, Bfloat16GoesIntoFloat32ByItsMasters) {
  const TempDirectory narrow("narrow");
  const std::string written = "model.layers.1.attention_norm.weight";
  run_sharded(2, at::kBFloat16, [&](ShardedRun& run, const auto& world) {
    run.train(3, 5e-3);
    const at::NoGradGuard no_grad;
    for (const NamedTensor& one : run.state.tensors) {
      if (one.name == written) one.tensor.fill_(0.5);  // its master is not updated yet
    }
    CheckpointManager(narrow.path(), {}, world).save(run.state, 3);
  });
  const Values saved = whole_values(narrow.path(), at::kBFloat16);
  ASSERT_TRUE(saved.contains(written));
  EXPECT_FALSE(at::equal(saved.at("model.output.weight").to(at::kFloat), saved.at(master_of("model.output.weight"))));
  for (const int ranks : {1, 3}) {
    run_sharded(ranks, at::kFloat, [&](ShardedRun& run, const auto& world) {
      expect_refused(CheckpointManager(narrow.path(), {}, world), run.state, "F32", "BF16");
      EXPECT_TRUE(CheckpointManager(narrow.path(), {.convert_dtype = true}, world).load_latest(run.state));
      for (const NamedTensor& one : run.state.tensors) {
        if (one.name == written) {
          expect_values(one, saved.at(written).to(at::kFloat));
        } else {
          expect_values(one, saved.at(one.name.starts_with("model.") ? master_of(one.name) : one.name));
        }
      }
    });
  }
}

}  // namespace
}  // namespace phalanx
