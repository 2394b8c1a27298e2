// Sharded data parallelism on the debug Llama: equal to the bit to DistributedDataParallel, and within rounding to one
// rank, whatever is sharded, resharded, accumulated or replicated.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

constexpr std::int64_t kBatch = 24, kSeq = 8;

struct Layout {
  std::string name;
  int stage = 0;  // 0: DistributedDataParallel
  bool reshard = true;
  int replicas = 1;
  int micro_batches = 1;
  bool defer = true;      // the reduction, to the last micro-batch
  bool hand_out = false;  // without defer: publish each micro-batch's average, over the copies, too
  bool tied = false;
  bool adamw = true;
  std::optional<at::ScalarType> dtype = std::nullopt;  // of parameters in use
  kernels::CheckpointPolicy recompute = nullptr;       // blocks are checkpointed, but for what it keeps
  bool narrow = false;                                 // bfloat16 throughout, but for the optimizer and its masters
};

bool keep_nothing(kernels::SavedOp /*op*/, int /*nth*/) { return false; }

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<NamedTensor> weights;  // whole
  FullyShardStatistics statistics;
};

// [batch, seq + 1]: arithmetic progressions modulo a small number, so that there is something to learn.
at::Tensor progressions(int step) {
  const at::Tensor row = at::arange(kBatch, at::kLong).add(kBatch * step).unsqueeze(1);
  const at::Tensor column = at::arange(kSeq + 1, at::kLong).unsqueeze(0);
  return at::remainder(row.mul(7).add(column.mul(row.remainder(3).add(1))), 61);
}

// The whole tensors, from the ranks that hold their rows.
std::vector<NamedTensor> whole(const std::vector<NamedTensor>& tensors, Communicator& comm) {
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor, shard] : tensors) {
    if (!shard) {
      result.push_back({name, tensor.detach().clone()});
      continue;
    }
    const at::Tensor sum = at::zeros(shard->spec.shape(), tensor.options());
    const Box box = shard->box();
    EXPECT_EQ(tensor.sizes().vec(), box.shape) << name;
    if (shard->is_first_holder()) sum.narrow(0, box.offsets[0], box.shape[0]).copy_(tensor);
    comm.all_reduce(sum);
    result.push_back({name, sum});
  }
  std::ranges::sort(result, {}, &NamedTensor::name);
  return result;
}

Outcome train(const std::shared_ptr<Communicator>& world, const Layout& layout, int steps) {
  auto config = models::llama_flavor("debug");
  config.tie_embeddings = layout.tied;
  const bool sharding = layout.stage > 0;
  models::Llama model(config, {.dtype = layout.narrow ? at::kBFloat16 : at::kFloat, .without_memory = sharding});
  for (const auto& layer : model.layers) {
    if (layout.recompute) checkpoint_activations(*layer, layout.recompute);
  }
  const DeviceMesh mesh(world, {{"dp_replicate", layout.replicas}, {"dp_shard", world->size() / layout.replicas}});
  std::unique_ptr<DistributedDataParallel> ddp;
  std::unique_ptr<FullyShardedDataParallel> sharded;
  if (sharding) {
    sharded = std::make_unique<FullyShardedDataParallel>(
        model, mesh,
        FullyShardOptions{.stage = layout.stage,
                          .reshard_after_forward = layout.reshard,
                          .param_dtype = layout.dtype,
                          .reduce_dtype = layout.dtype ? std::optional(at::kFloat) : std::nullopt});
    sharded->initialise(1);
  } else {
    nn::initialise(model, 1);
    ddp = std::make_unique<DistributedDataParallel>(model, world,
                                                    DdpOptions{.first_bucket_bytes = 50'000, .bucket_bytes = 200'000});
  }
  const std::vector<NamedTensor> parameters = sharding ? sharded->parameters() : ddp->parameters();
  std::unique_ptr<Optimizer> optimizer;
  if (layout.adamw) {
    optimizer = std::make_unique<AdamW>(parameters);
  } else {
    optimizer = std::make_unique<Sgd>(parameters, SgdOptions{.momentum = 0.9});
  }
  const std::int64_t share = kBatch / world->size(), part = share / layout.micro_batches;
  Outcome outcome;
  for (int step = 0; step < steps; ++step) {
    const at::Tensor mine = progressions(step).narrow(0, world->rank() * share, share);
    const at::Tensor mean = at::zeros({}, at::kDouble);
    for (int m = 0; m < layout.micro_batches; ++m) {
      std::optional<DistributedDataParallel::NoSync> ddp_held;
      std::optional<FullyShardedDataParallel::NoSync> held;
      std::optional<FullyShardedDataParallel::NoAllReduce> more;
      if (!layout.defer && !layout.hand_out && m + 1 < layout.micro_batches) more.emplace(sharded->no_all_reduce());
      if (layout.defer && m + 1 < layout.micro_batches) {
        sharding ? (void)held.emplace(sharded->no_sync()) : (void)ddp_held.emplace(ddp->no_sync());
      }
      const at::Tensor tokens = mine.narrow(0, m * part, part);
      const at::Tensor loss = model.loss(tokens.narrow(1, 0, kSeq), tokens.narrow(1, 1, kSeq));
      loss.div(layout.micro_batches).backward();
      mean.add_(loss.detach().to(at::kDouble).div(layout.micro_batches));
    }
    world->all_reduce(mean, {.op = ReduceOp::avg});
    outcome.losses.push_back(mean.item<double>());
    outcome.norms.push_back(clip_grad_norm(parameters, 1.0, sharding ? world.get() : nullptr).value());
    optimizer->step(2e-3);
    optimizer->zero_grad();
  }
  outcome.weights = whole(parameters, *world);
  if (sharding) outcome.statistics = sharded->statistics();
  return outcome;
}

std::vector<Outcome> run(int world, const Layout& layout, int steps = 20) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(world));
  run_local_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
    outcomes[static_cast<std::size_t>(comm->rank())] = train(comm, layout, steps);
  });
  return outcomes;
}

void expect_same_bits(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  ASSERT_EQ(a.weights.size(), b.weights.size());
  for (std::size_t i = 0; i < a.weights.size(); ++i) {
    EXPECT_EQ(a.weights[i].name, b.weights[i].name);
    EXPECT_TRUE(at::equal(a.weights[i].tensor, b.weights[i].tensor)) << a.weights[i].name;
  }
}

// Tolerance for data parallelism: Adam amplifies rounding where gradients are near zero.
void expect_close(const Outcome& a, const Outcome& one, bool adamw, double summed_rates) {
  for (std::size_t s = 0; s < one.losses.size(); ++s)
    EXPECT_NEAR(a.losses[s], one.losses[s], 1e-5 * one.losses[s]) << s;
  for (std::size_t i = 0; i < one.weights.size(); ++i) {
    SCOPED_TRACE(one.weights[i].name);
    const at::Tensor difference = a.weights[i].tensor.sub(one.weights[i].tensor).to(at::kDouble);
    const double largest = difference.abs().max().item<double>();
    if (adamw) {
      EXPECT_LT(difference.norm().item<double>(), 2e-5 * one.weights[i].tensor.to(at::kDouble).norm().item<double>());
      EXPECT_LT(largest, 0.2 * summed_rates);
    } else {
      EXPECT_LT(largest, 1e-6);
    }
  }
}

std::string label(const Layout& layout) {
  return fmt::format("{} stage {} reshard {} replicas {} micro-batches {}", layout.name, layout.stage, layout.reshard,
                     layout.replicas, layout.micro_batches);
}

class ShardedLlama : public ::testing::TestWithParam<int> {};

TEST_P(ShardedLlama, EveryStageHasTheBitsOfDataParallelism) {
  const int world = GetParam();
  for (const bool adamw : {true, false}) {
    const auto one = run(1, {.name = "one", .adamw = adamw})[0];
    EXPECT_LT(one.losses.back(), one.losses.front());
    const auto ddp = run(world, {.name = "ddp", .adamw = adamw});
    expect_close(ddp[0], one, adamw, 20 * 2e-3);
    for (const Layout& layout :
         {Layout{.name = "zero-1", .stage = 1}, Layout{.name = "zero-2", .stage = 2},
          Layout{.name = "zero-3", .stage = 3}, Layout{.name = "zero-3", .stage = 3, .reshard = false}}) {
      Layout chosen = layout;
      chosen.adamw = adamw;
      SCOPED_TRACE(label(chosen));
      const auto ranks = run(world, chosen);
      for (const auto& rank : ranks) expect_same_bits(rank, ddp[0]);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Worlds, ShardedLlama, ::testing::Values(1, 2, 3, 4, 8));

// 24 sequences in 4 micro-batches of 1, 2 and 3 ranks; 4 and 8 ranks have 6 and 3 sequences each, so 3 micro-batches.
TEST(ShardedLlamaAccumulating, DeferredReductionHasTheBitsOfDataParallelism) {
  const auto one = run(1, {.name = "one"})[0];
  for (const int world : {1, 2, 3, 4, 8}) {
    const int parts = world <= 3 ? 4 : 3;
    const auto ddp = run(world, {.name = "ddp", .micro_batches = parts});
    expect_close(ddp[0], one, true, 20 * 2e-3);
    for (const auto& [stage, reshard] : {std::pair{1, true}, {2, true}, {3, true}, {3, false}}) {
      SCOPED_TRACE(fmt::format("{} ranks, stage {}, reshard {}", world, stage, reshard));
      expect_same_bits(run(world, {.name = "sharded", .stage = stage, .reshard = reshard, .micro_batches = parts})[0],
                       ddp[0]);
    }
  }
}

// --- ranks that are processes

using MakeWorld = std::shared_ptr<Communicator> (*)(const std::shared_ptr<Store>& store, int rank, int size);

std::shared_ptr<Communicator> shm_world(const std::shared_ptr<Store>& store, int rank, int size) {
  return make_shm_communicator(*store, rank, size);
}
std::shared_ptr<Communicator> gloo_world(const std::shared_ptr<Store>& store, int rank, int size) {
  return make_gloo_communicator(store, rank, size);
}

// check(outcome) on every rank, in its process; "" or what went wrong.
template <class Check>
std::string run_processes(int world, MakeWorld make, const Layout& layout, int steps, Check check) {
  TcpStoreServer server;
  return run_forked_ranks(world, [&](int rank) {
    const auto comm = make(std::make_shared<TcpStore>(server.address()), rank, world);
    check(train(comm, layout, steps));
    if (::testing::Test::HasFailure()) throw Error("what was expected is above");
  });
}

// Shared memory uses other code than threads: windows that come and go, data that peers read in place.
TEST(ShardedLlamaProcesses, HaveTheBitsOfThreadsOverSharedMemory) {
  struct Case {
    int world, micro_batches, steps;
  };
  for (const auto& [world, micro_batches, steps] :
       {Case{2, 1, 20}, Case{2, 4, 20}, Case{3, 1, 20}, Case{3, 4, 20}, Case{4, 1, 20}, Case{8, 1, 6}}) {
    const auto ddp = run(world, {.name = "ddp", .micro_batches = micro_batches}, steps);
    for (Layout layout :
         {Layout{.name = "ddp"}, Layout{.name = "zero-1", .stage = 1}, Layout{.name = "zero-2", .stage = 2},
          Layout{.name = "zero-3", .stage = 3}, Layout{.name = "zero-3", .stage = 3, .reshard = false}}) {
      layout.micro_batches = micro_batches;
      SCOPED_TRACE(fmt::format("{} ranks, {}", world, label(layout)));
      EXPECT_EQ(run_processes(world, shm_world, layout, steps,
                              [&](const Outcome& outcome) { expect_same_bits(outcome, ddp[0]); }),
                "");
    }
  }
}

TEST(ShardedLlamaProcesses, AreWithinRoundingOverGloo) {
  const auto one = run(1, {.name = "one"})[0];
  for (const auto& [world, layout] : {std::pair{2, Layout{.name = "zero-1", .stage = 1}},
                                      {3, Layout{.name = "zero-3", .stage = 3}},
                                      {4, Layout{.name = "hsdp", .stage = 3, .replicas = 2}}}) {
    SCOPED_TRACE(fmt::format("{} ranks, {}", world, label(layout)));
    EXPECT_EQ(run_processes(world, gloo_world, layout, 20,
                            [&](const Outcome& outcome) { expect_close(outcome, one, true, 20 * 2e-3); }),
              "");
  }
}

TEST(ShardedLlamaRecomputing, HasTheBitsOfDataParallelismWithoutIt) {
  for (const int world : {1, 2, 3, 4, 8}) {
    const auto ddp = run(world, {.name = "ddp"});
    for (const auto& recompute : {keep_nothing, op_sac_policy}) {
      if (world % 2 != 0 && recompute == op_sac_policy) continue;  // the same, at fewer worlds
      for (const auto& [stage, reshard] : {std::pair{0, true}, {1, true}, {2, true}, {3, true}, {3, false}}) {
        SCOPED_TRACE(fmt::format("{} ranks, stage {}, reshard {}", world, stage, reshard));
        expect_same_bits(
            run(world, {.name = "recomputing", .stage = stage, .reshard = reshard, .recompute = recompute})[0], ddp[0]);
      }
    }
  }
}

// bfloat16 has 8 bits of precision. The losses of a run in it stay within 2 % of float32's here, and fall as they do.
// All stages compute the same, so they agree to the bit, at any number of ranks, with recomputation, too.
TEST(ShardedLlamaMixedPrecision, StagesAgreeAndFollowFloat32) {
  const auto one = run(1, {.name = "one"})[0];
  for (const int world : {1, 3}) {
    const auto first = run(world, {.name = "bf16", .stage = 1, .dtype = at::kBFloat16});
    for (std::size_t s = 0; s < one.losses.size(); ++s) {
      EXPECT_NEAR(first[0].losses[s], one.losses[s], 0.02 * one.losses[s]) << s;
      EXPECT_NE(first[0].losses[s], one.losses[s]);
    }
    for (const int stage : {2, 3}) {
      SCOPED_TRACE(::testing::Message() << world << " ranks, stage " << stage);
      expect_same_bits(run(world, {.name = "bf16", .stage = stage, .dtype = at::kBFloat16})[0], first[0]);
    }
    expect_same_bits(run(world, {.name = "bf16", .stage = 3, .dtype = at::kBFloat16, .recompute = op_sac_policy})[0],
                     first[0]);
  }
}

// The model's own parameters are in bfloat16, AdamW's masters in float32. Gradients are averaged in bfloat16,
// accumulated in float32 and rounded once, wherever they go. Losses are as close to float32's as above.
TEST(ShardedLlamaNarrow, StagesHaveTheBitsOfDataParallelism) {
  const auto one = run(1, {.name = "one"})[0];
  for (const int world : {1, 2, 3}) {
    const auto ddp = run(world, {.name = "ddp", .narrow = true});
    for (std::size_t s = 0; s < one.losses.size(); ++s)
      EXPECT_NEAR(ddp[0].losses[s], one.losses[s], 0.02 * one.losses[s]) << s;
    EXPECT_EQ(ddp[0].weights[0].tensor.scalar_type(), at::kBFloat16);
    for (const int stage : {1, 2, 3}) {
      SCOPED_TRACE(fmt::format("{} ranks, stage {}", world, stage));
      expect_same_bits(run(world, {.name = "bf16", .stage = stage, .narrow = true})[0], ddp[0]);
    }
  }
}

TEST(ShardedLlamaAccumulating, ReductionInEveryMicroBatchIsWithinRounding) {
  const auto one = run(1, {.name = "one"})[0];
  for (const int world : {2, 3, 4}) {
    for (const int stage : {1, 2, 3}) {
      for (const bool hand_out : {false, true}) {
        if (!hand_out && world != 3) continue;  // a test below
        SCOPED_TRACE(fmt::format("{} ranks, stage {}, handed out {}", world, stage, hand_out));
        const auto ranks = run(world, {.name = "sharded",
                                       .stage = stage,
                                       .micro_batches = world == 4 ? 3 : 4,
                                       .defer = false,
                                       .hand_out = hand_out});
        expect_close(ranks[0], one, true, 20 * 2e-3);
        expect_same_bits(ranks[1], ranks[0]);
      }
    }
  }
}

// The sum is in the order of the micro-batches, whatever is gathered again, recomputed or published in between.
TEST(ShardedLlamaAccumulating, ReductionInEveryMicroBatchHasTheSameBitsHoweverItIsSharded) {
  for (const auto dtype : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
    const Layout base{.name = "sharded", .stage = 3, .micro_batches = 3, .defer = false, .dtype = dtype};
    const auto first = run(2, base, 6);
    for (const auto& [stage, reshard, recompute] : {std::tuple<int, bool, kernels::CheckpointPolicy>{2, true, nullptr},
                                                    {3, false, nullptr},
                                                    {3, true, keep_nothing},
                                                    {2, true, op_sac_policy}}) {
      Layout layout = base;
      layout.stage = stage;
      layout.reshard = reshard;
      layout.recompute = recompute;
      SCOPED_TRACE(label(layout));
      expect_same_bits(run(2, layout, 6)[0], first[0]);
    }
    Layout one = base;
    const auto alone = run(1, one, 6);
    for (std::size_t s = 0; s < alone[0].losses.size(); ++s) {
      EXPECT_NEAR(first[0].losses[s], alone[0].losses[s], (dtype ? 5e-3 : 1e-5) * alone[0].losses[s]) << s;
    }
  }
}

TEST(ShardedLlamaReplicated, HybridIsWithinRoundingAndAllRanksAgree) {
  const auto one = run(1, {.name = "one"})[0];
  for (const Layout& layout :
       {Layout{.name = "hsdp", .stage = 1, .replicas = 2}, Layout{.name = "hsdp", .stage = 2, .replicas = 2},
        Layout{.name = "hsdp", .stage = 3, .replicas = 2},
        Layout{.name = "hsdp", .stage = 3, .reshard = false, .replicas = 2},
        Layout{.name = "hsdp", .stage = 3, .replicas = 2, .micro_batches = 3},
        Layout{.name = "hsdp", .stage = 3, .replicas = 2, .micro_batches = 3, .defer = false},
        Layout{.name = "hsdp", .stage = 2, .replicas = 2, .micro_batches = 3, .defer = false},
        Layout{.name = "hsdp", .stage = 3, .replicas = 2, .recompute = keep_nothing}}) {
    SCOPED_TRACE(label(layout));
    const auto ranks = run(4, layout);
    expect_close(ranks[0], one, true, 20 * 2e-3);
    for (const auto& rank : ranks) expect_same_bits(rank, ranks[0]);
  }
}

TEST(ShardedLlamaTied, TiedEmbeddingsAreOneUnitThatStays) {
  const auto ddp = run(2, {.name = "ddp", .tied = true}, 6);
  for (const int stage : {1, 3}) expect_same_bits(run(2, {.name = "tied", .stage = stage, .tied = true}, 6)[1], ddp[0]);
}

TEST(ShardedLlamaUnits, AreEmbeddingBlocksAndHead) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    models::Llama model(models::llama_flavor("debug"), {.without_memory = true});
    const FullyShardedDataParallel sharded(model, DeviceMesh(world, {{"dp_shard", 2}}));
    const auto units = sharded.units();
    ASSERT_EQ(units.size(), 4U);
    EXPECT_THAT(units[0], ElementsAre("tok_embeddings.weight"));
    EXPECT_EQ(units[1].size(), 9U);
    EXPECT_THAT(units[3], ElementsAre("norm.weight", "output.weight"));
    const auto statistics = sharded.statistics();
    EXPECT_LT(statistics.padding_bytes, model.parameter_count() * 4 / 20);
  });
}

TEST(ShardedLlamaErrors, UnusedParametersAreNamedOnEveryRank) {
  EXPECT_THAT(error_text([&] {
                run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
                  models::Llama model(models::llama_flavor("debug"), {.without_memory = true});
                  FullyShardedDataParallel sharded(model, DeviceMesh(world, {{"dp_shard", 2}}));
                  sharded.initialise(1);
                  const at::Tensor tokens = progressions(0);
                  const auto rope = nn::rotary_tables({.head_dim = model.config().head_dim()}, tokens.size(1));
                  nn::call(model.layers[1], nn::call(model.tok_embeddings, tokens), rope).sum().backward();
                });
              }),
              HasSubstr("gave no gradient to"));
}

}  // namespace
}  // namespace phalanx
