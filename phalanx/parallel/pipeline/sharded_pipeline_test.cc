// Pipelines whose stages are sharded: the values are those of one rank, and to the bit those under DDP.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/pipeline/testing/pipeline_test_support.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/transfers.h"

namespace phalanx {
namespace {

using namespace pipeline_testing;
using schedule::make_schedule;

/// The rank's stages, sharded over "dp_shard".
struct ShardedStages {
  ShardedStages(const schedule::Schedule& plan, const DeviceMesh& mesh, Layers whose, const FullyShardOptions& options)
      : stages(stages_of(plan, mesh.coordinate("pp"), whose)) {
    for (auto& stage : stages) {
      models.push_back(std::make_unique<FullyShardedDataParallel>(*stage.module, mesh, options));
      stage.sharding = models.back()->in_pipeline();
    }
  }
  std::map<std::string, NamedTensor> parameters() const {
    std::map<std::string, NamedTensor> result;
    for (const auto& model : models) {
      for (const auto& p : model->parameters()) result.emplace(p.name, p);
    }
    return result;
  }

  void reset_gradients() const {
    for (const auto& [name, p] : parameters()) p.tensor.mutable_grad().reset();
  }

  std::vector<PipelineStage> stages;
  std::vector<std::unique_ptr<FullyShardedDataParallel>> models;
};

at::Tensor rows_of(const at::Tensor& whole, const NamedTensor& held) {
  const Box box = held.shard->box();
  return whole.narrow(0, box.offsets[0], box.shape[0]);
}

std::string text_of(const FullyShardOptions& options) {
  return "stage " + std::to_string(options.stage) + (options.reshard_after_forward ? "" : ", kept") +
         (options.prefetch ? "" : ", no prefetch");
}

/// All schedules with all ZeRO stages; other options, nested units, and foreign layers with two of them.
std::vector<FullyShardOptions> ways_to_shard(const std::string& schedule, Layers whose) {
  const FullyShardOptions kept = {.stage = 3, .reshard_after_forward = false};
  const bool is_shown = schedule == "1F1B" || schedule == "ZBVZeroBubble";
  if (whose != Layers::own) return is_shown ? std::vector{FullyShardOptions{}, kept} : std::vector<FullyShardOptions>{};
  std::vector<FullyShardOptions> ways = {{.stage = 1}, {.stage = 3}, kept};
  if (is_shown) {
    const std::vector<FullyShardOptions> more = {{.stage = 2}, {.prefetch = false}, {.offload = true}};
    ways.insert(ways.end(), more.begin(), more.end());
  }
  return ways;
}

void expect_one_rank_and_data_parallel_to_the_bit(Over over, const std::vector<std::string>& schedules,
                                                  const std::vector<Layers>& layers) {
  run_ranks(over, 4, [&](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"pp", 2}, {"dp_shard", 2}});
    const auto pp = mesh.communicator("pp");
    const at::Tensor x = random_rows(16, "x"), y = random_rows(16, "y");
    const auto half = static_cast<std::size_t>(mesh.coordinate("dp_shard"));
    for (const auto& name : schedules) {
      for (const Layers whose : layers) {
        const auto plan = make_schedule({.name = name, .ranks = 2, .micro_batches = 4});
        for (const auto& options : ways_to_shard(name, whose)) {
          SCOPED_TRACE(name + ", " + text_of(options));
          const auto whole = stages_of(plan, mesh.coordinate("pp"), whose);
          std::vector<std::unique_ptr<DistributedDataParallel>> ddp;
          for (const auto& stage : whole) {
            ddp.push_back(std::make_unique<DistributedDataParallel>(*stage.module, mesh.communicator("dp_shard")));
          }
          PipelineRuntime unsharded(pp, plan, whole, {.weight_split = WeightSplit::queue});
          const ShardedStages sharded(plan, mesh, whose, options);
          for (const auto& model : sharded.models) {
            const int units = whose == Layers::foreign ? 0 : kLayers / plan.stages();
            if (units > 0) {
              EXPECT_EQ(model->units().size(), static_cast<std::size_t>(units));
            }
          }
          PipelineRuntime pipeline(pp, plan, sharded.stages);
          const OneRank reference = one_rank(whose, 8);
          for (int step = 0; step < 2; ++step) {
            reference.step(x, y);
            const double loss = unsharded.step(x.chunk(2)[half], y.chunk(2)[half]).loss();
            EXPECT_EQ(pipeline.step(x.chunk(2)[half], y.chunk(2)[half]).loss(), loss);
            const at::NoGradGuard no_grad;
            for (const auto& [key, p] : sharded.parameters()) {
              if (p.tensor.numel() == 0) continue;
              const at::Tensor& grad = p.tensor.grad();
              ASSERT_TRUE(grad.defined()) << key;
              EXPECT_TRUE(at::equal(grad, rows_of(parameters_of(whole).at(key).grad(), p))) << key;
              const at::Tensor expected = reference.parameters().at(key).grad();
              EXPECT_LE((grad - rows_of(expected, p)).norm().item<double>(), 2e-6 * expected.norm().item<double>())
                  << key;
              p.tensor.sub_(grad, 0.1);
            }
            sharded.reset_gradients();
            descend(parameters_of(whole), 0.1);
            descend(reference.parameters(), 0.1);
          }
          for (const auto& model : sharded.models) EXPECT_EQ(model->statistics().synchronisations, 2);
        }
      }
    }
  });
}

TEST(ShardedPipeline, EqualsOneRankAndDataParallelToTheBit) {
  expect_one_rank_and_data_parallel_to_the_bit(Over::local, schedule::schedule_names(),
                                               {Layers::own, Layers::nested, Layers::foreign});
}
TEST(ShardedPipeline, OverNcclToTheBit) {
  expect_one_rank_and_data_parallel_to_the_bit(Over::nccl, {"1F1B", "ZBVZeroBubble"}, {Layers::own});
}

TEST(ShardedPipeline, GathersOnceAStepOrInEveryPass) {
  run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"pp", 2}, {"dp_shard", 2}});
    const auto plan = make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 4});
    const auto gathers = [&](const FullyShardOptions& options) {
      const ShardedStages sharded(plan, mesh, Layers::own, options);
      const std::int64_t for_two_units = sharded.models[0]->statistics().unsharded_bytes;
      PipelineRuntime pipeline(mesh.communicator("pp"), plan, sharded.stages);
      pipeline.step(random_rows(8, "x"), random_rows(8, "y"));
      const FullyShardStatistics before = sharded.models[0]->statistics();
      pipeline.step(random_rows(8, "x"), random_rows(8, "y"));
      const FullyShardStatistics after = sharded.models[0]->statistics();
      EXPECT_EQ(after.unsharded_bytes, for_two_units);  // and no more
      EXPECT_EQ(for_two_units > 0, options.stage == 3 && options.reshard_after_forward);
      return after.gathers - before.gathers;
    };
    const int units = kLayers / 2, micro_batches = 4;
    EXPECT_EQ(gathers({.stage = 1}), units);
    EXPECT_EQ(gathers({.stage = 3, .reshard_after_forward = false}), units);
    // Forward and backward of every micro-batch. A backward pass may find the last unit still unsharded.
    EXPECT_GE(gathers({.stage = 3, .prefetch = false}), 2 * micro_batches * (units - 1));
    EXPECT_LE(gathers({.stage = 3, .prefetch = false}), 2 * micro_batches * units);
  });
}

// Parameters that an evaluation has gathered are out of date after it.
TEST(ShardedPipeline, AnEvaluationBetweenStepAndUpdate) {
  run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"pp", 2}, {"dp_shard", 2}});
    const auto plan = make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 2});
    const at::Tensor x = random_rows(4, "x"), y = random_rows(4, "y");
    const auto losses_of_two_steps = [&](bool evaluates) {
      const ShardedStages sharded(plan, mesh, Layers::own, {.stage = 1});
      PipelineRuntime pipeline(mesh.communicator("pp"), plan, sharded.stages);
      const double first = pipeline.step(x, y).loss();
      EXPECT_EQ(evaluates ? pipeline.evaluate(x, y).loss() : first, first);
      {
        const at::NoGradGuard no_grad;
        for (const auto& [key, p] : sharded.parameters()) p.tensor.add_(1.0);
      }
      sharded.reset_gradients();
      return std::pair(first, pipeline.step(x, y).loss());
    };
    const auto plain = losses_of_two_steps(false);
    EXPECT_NE(plain.first, plain.second);
    EXPECT_EQ(losses_of_two_steps(true), plain);
  });
}

TEST(ShardedPipeline, UnshardAndReshardOfTheSchedule) {
  run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"pp", 2}, {"dp_shard", 2}});
    const auto passes = make_schedule({.name = "ZBV", .ranks = 2, .micro_batches = 4});
    const auto plan = schedule::add_transfers(passes, {.unshard_stages = 1, .reduce_gradients = true});
    const at::Tensor x = random_rows(8, "x"), y = random_rows(8, "y");
    const ShardedStages without(passes, mesh, Layers::own, {}), with(plan, mesh, Layers::own, {});
    PipelineRuntime plain(mesh.communicator("pp"), passes, without.stages);
    PipelineRuntime pipeline(mesh.communicator("pp"), plan, with.stages);
    EXPECT_EQ(pipeline.step(x, y).loss(), plain.step(x, y).loss());
    for (const auto& [key, p] : with.parameters()) {
      EXPECT_TRUE(at::equal(p.tensor.grad(), without.parameters().at(key).tensor.grad())) << key;
    }
  });
}

TEST(ShardedPipeline, ReplicatedShardsAndRecomputation) {
  run_local_ranks(8, [&](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"pp", 2}, {"dp_replicate", 2}, {"dp_shard", 2}});
    const auto plan = make_schedule({.name = "ZBV", .ranks = 2, .micro_batches = 4});
    const at::Tensor x = random_rows(32, "x"), y = random_rows(32, "y");
    const auto mine = static_cast<std::size_t>(mesh.coordinate("dp_replicate") * 2 + mesh.coordinate("dp_shard"));
    ShardedStages sharded(plan, mesh, Layers::own, {});
    for (const auto& stage : sharded.stages) {
      for (const auto& child : stage.module->children()) checkpoint_activations(dynamic_cast<nn::Module&>(*child));
    }
    PipelineRuntime pipeline(mesh.communicator("pp"), plan, sharded.stages);
    const OneRank reference = one_rank(Layers::own, 16);
    for (int step = 0; step < 2; ++step) {
      reference.step(x, y);
      pipeline.step(x.chunk(4)[mine], y.chunk(4)[mine]);
      const at::NoGradGuard no_grad;
      for (const auto& [key, p] : sharded.parameters()) {
        if (p.tensor.numel() == 0) continue;
        const at::Tensor expected = reference.parameters().at(key).grad();
        EXPECT_LE((p.tensor.grad() - rows_of(expected, p)).norm().item<double>(), 2e-6 * expected.norm().item<double>())
            << key;
        p.tensor.sub_(p.tensor.grad(), 0.1);
      }
      sharded.reset_gradients();
      descend(reference.parameters(), 0.1);
    }
  });
}

TEST(ShardedPipeline, GradientsAddUpInTheirOwnDtype) {
  run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"pp", 2}, {"dp_shard", 2}});
    // So many equal addends that their sum in bfloat16 would stop growing half-way.
    constexpr int kMany = 512;
    const auto plan = make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = kMany});
    const at::Tensor x = random_rows(1, "x").repeat({kMany, 1}), y = random_rows(1, "y").repeat({kMany, 1});
    const ShardedStages exact(plan, mesh, Layers::own, {});
    const ShardedStages mixed(plan, mesh, Layers::own, {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
    PipelineRuntime(mesh.communicator("pp"), plan, exact.stages).step(x, y);
    std::vector<PipelineStage> stages = mixed.stages;
    for (auto& stage : stages) {
      if (!stage.loss) continue;
      stage.loss = [forward = stage.forward](const at::Tensor& in, const at::Tensor& target) {
        return squared_error(forward(in).to(at::kFloat), target);
      };
    }
    PipelineRuntime(mesh.communicator("pp"), plan, stages).step(x, y);
    for (const auto& [key, p] : mixed.parameters()) {
      if (p.tensor.numel() == 0) continue;
      EXPECT_EQ(p.tensor.grad().scalar_type(), at::kFloat) << key;
      // The error of one micro-batch's products in bfloat16; their sum in float32 adds nothing to it.
      EXPECT_LE(relative_difference(p.tensor.grad(), exact.parameters().at(key).tensor.grad()), 0.03) << key;
    }
  });
}

TEST(ShardedPipelineErrors, AStageThatDoesNotKnowOfItsSharding) {
  const auto errors = errors_of(2, [](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"pp", 1}, {"dp_shard", 2}});
    const auto plan = make_schedule({.name = "GPipe", .ranks = 1, .micro_batches = 2});
    ShardedStages sharded(plan, mesh, Layers::own, {});
    sharded.stages[0].sharding = nullptr;
    PipelineRuntime pipeline(mesh.communicator("pp"), plan, sharded.stages);
    pipeline.step(random_rows(4, "x"), random_rows(4, "y"));
  });
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("set PipelineStage::sharding to in_pipeline()"));
}

TEST(ShardedPipelineErrors, AFailingRankEndsTheStepOfAll) {
  const auto errors = errors_of(4, [](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"pp", 2}, {"dp_shard", 2}});
    const auto plan = make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 4});
    ShardedStages sharded(plan, mesh, Layers::own, {});
    if (world->rank() == 3) {
      sharded.stages[0].loss = [](const at::Tensor&, const at::Tensor&) -> at::Tensor { throw Error("out of luck"); };
    }
    PipelineRuntime pipeline(mesh.communicator("pp"), plan, sharded.stages);
    pipeline.step(random_rows(8, "x"), random_rows(8, "y"));
  });
  for (const auto& error : errors) EXPECT_FALSE(error.empty());
  EXPECT_THAT(errors[3], HasSubstr("pipeline stage 1, rank 1, 1F0: out of luck"));
  EXPECT_THAT(errors[1], HasSubstr("out of luck"));
}

TEST(ShardedPipelineErrors, TheGraphCannotBeWalkedWhereWeightsComeAndGo) {
  const auto errors = errors_of(1, [](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"pp", 1}, {"dp_shard", 1}});
    const auto plan = make_schedule({.name = "GPipe", .ranks = 1, .micro_batches = 2});
    const ShardedStages sharded(plan, mesh, Layers::foreign, {});
    PipelineRuntime(mesh.communicator("pp"), plan, sharded.stages, {.weight_split = WeightSplit::graph});
  });
  EXPECT_THAT(errors[0], HasSubstr("stage 0 is sharded, and a walk over the graph"));
}

}  // namespace
}  // namespace phalanx
