// Pipelines against one rank: every schedule, Phalanx layers and others, and data parallelism on top.
#include "phalanx/parallel/pipeline/pipeline_runtime.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/pipeline/testing/pipeline_test_support.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/simulate.h"
#include "phalanx/schedule/transfers.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using pipeline_testing::descend;
using pipeline_testing::errors_of;
using pipeline_testing::Layers;
using pipeline_testing::one_rank;
using pipeline_testing::OneRank;
using pipeline_testing::Over;
using pipeline_testing::parameters_of;
using pipeline_testing::random_rows;
using pipeline_testing::relative_difference;
using pipeline_testing::run_ranks;
using pipeline_testing::squared_error;
using pipeline_testing::stages_of;
using schedule::make_schedule;

constexpr int kMicroBatches = 8;

std::vector<std::string> schedules_for(int ranks) {
  std::vector<std::string> names;
  for (const auto& name : schedule::schedule_names()) {
    if (name != "DualPipeV" || kMicroBatches >= 2 * ranks) names.push_back(name);
  }
  return names;
}

// Three steps of a schedule: losses and gradients against one rank.
void expect_one_rank(const std::shared_ptr<Communicator>& comm, const schedule::Schedule& plan, Layers whose) {
  SCOPED_TRACE(testing::Message() << plan.name << (whose == Layers::own ? ", own" : ", foreign"));
  const at::Tensor x = random_rows(16, "x"), y = random_rows(16, "y");
  const OneRank reference = one_rank(whose, kMicroBatches);
  const auto stages = stages_of(plan, comm->rank(), whose);
  PipelineRuntime pipeline(comm, plan, stages);
  const auto mine = parameters_of(stages), whole = reference.parameters();
  const bool same_order = pipeline_testing::adds_in_order(plan);
  for (int step = 0; step < 3; ++step) {
    const auto expected = reference.step(x, y);
    const auto result = pipeline.step(x, y);
    ASSERT_EQ(result.losses.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(result.losses[i], expected[i], 2e-5 * expected[i]);
    for (const auto& [name, p] : mine) {
      ASSERT_TRUE(p.grad().defined()) << name;
      EXPECT_LE(relative_difference(p.grad(), whole.at(name).grad()), 1e-6) << name;
      if (same_order) {
        EXPECT_TRUE(at::equal(p.grad(), whole.at(name).grad())) << name;
      }
    }
    EXPECT_EQ(pipeline.statistics().peak_live_activations,
              schedule::peak_live_activations(plan)[static_cast<std::size_t>(comm->rank())]);
    descend(mine, 0.1);
    descend(whole, 0.1);
  }
}

TEST(Pipeline, EverySchedule) {
  for (const int ranks : {2, 4}) {
    run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& comm) {
      for (const auto& name : schedules_for(ranks)) {
        const auto plan = make_schedule({.name = name, .ranks = ranks, .micro_batches = kMicroBatches});
        expect_one_rank(comm, plan, Layers::own);
        expect_one_rank(comm, plan, Layers::foreign);
      }
    });
  }
}

TEST(PipelineOverNccl, EverySchedule) {
  for (const int ranks : {2, 4}) {
    run_ranks(Over::nccl, ranks, [&](const std::shared_ptr<Communicator>& comm) {
      for (const auto& name : schedules_for(ranks)) {
        expect_one_rank(comm, make_schedule({.name = name, .ranks = ranks, .micro_batches = kMicroBatches}),
                        Layers::own);
      }
    });
  }
}

TEST(Pipeline, OnProcessesOverSharedMemory) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(2,
                             [&](int rank) {
                               TcpStore store(server.address());
                               const std::shared_ptr<Communicator> comm = make_shm_communicator(store, rank, 2);
                               const auto plan =
                                   make_schedule({.name = "ZB1P", .ranks = 2, .micro_batches = kMicroBatches});
                               expect_one_rank(comm, plan, Layers::own);
                               if (testing::Test::HasFailure()) throw Error("see above");
                             }),
            "");
}

TEST(Pipeline, OneRankOneMicroBatch) {
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& comm) {
    const auto plan = make_schedule({.name = "GPipe", .ranks = 1, .micro_batches = 1});
    const auto stages = stages_of(plan, 0, Layers::own);
    PipelineRuntime pipeline(comm, plan, stages);
    const at::Tensor x = random_rows(4, "x"), y = random_rows(4, "y");
    EXPECT_NEAR(pipeline.step(x, y).loss(), one_rank(Layers::own, 1).step(x, y)[0], 1e-6);
  });
}

TEST(Pipeline, TheSumOfTheLosses) {
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    const auto plan = make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 4});
    const auto stages = stages_of(plan, comm->rank(), Layers::own), again = stages_of(plan, comm->rank(), Layers::own);
    const at::Tensor x = random_rows(8, "x"), y = random_rows(8, "y");
    PipelineRuntime(comm, plan, stages).step(x, y);
    PipelineRuntime(comm, plan, again, {.loss = PipelineLoss::sum}).step(x, y);
    for (const auto& [name, p] : parameters_of(stages)) {
      EXPECT_LE(relative_difference(parameters_of(again).at(name).grad(), 4 * p.grad()), 1e-6);
    }
  });
}

void expect_forward_only(Over over) {
  run_ranks(over, 2, [&](const std::shared_ptr<Communicator>& comm) {
    for (const char* name : {"1F1B", "ZBV"}) {
      const auto plan = make_schedule({.name = name, .ranks = 2, .micro_batches = 4});
      const auto stages = stages_of(plan, comm->rank(), Layers::own);
      PipelineRuntime pipeline(comm, plan, stages);
      const at::Tensor x = random_rows(8, "x"), y = random_rows(8, "y");
      const double expected = pipeline.step(x, y).loss();
      for (const auto& [key, p] : parameters_of(stages)) p.mutable_grad().reset();
      EXPECT_NEAR(pipeline.evaluate(x, y).loss(), expected, 1e-6);
      EXPECT_NEAR(pipeline.evaluate(at::cat({x, x}), at::cat({y, y})).loss(), expected, 1e-6);  // another shape
      const auto outputs = pipeline.forward(x).outputs;
      if (comm->rank() == plan.rank_of_stage.back()) {
        ASSERT_EQ(outputs.size(), 4U);
        EXPECT_NEAR(squared_error(at::cat(outputs), y).item<double>(), expected, 1e-6);
        EXPECT_FALSE(outputs[0].requires_grad());
      } else {
        EXPECT_TRUE(outputs.empty());
      }
      for (const auto& [key, p] : parameters_of(stages)) EXPECT_FALSE(p.grad().defined()) << key;
      EXPECT_NEAR(pipeline.step(x, y).loss(), expected, 1e-6);  // training goes on
    }
  });
}

TEST(Pipeline, ForwardOnly) { expect_forward_only(Over::local); }
TEST(PipelineOverNccl, ForwardOnly) { expect_forward_only(Over::nccl); }

// The stages of a rank as one module.
struct RankModule : torch::nn::Module {
  explicit RankModule(const std::vector<PipelineStage>& stages) {
    for (const auto& stage : stages) register_module("stage" + std::to_string(stage.index), stage.module);
  }
};

void expect_data_parallel_on_top(Over over, const std::vector<std::string>& schedules,
                                 const std::vector<Layers>& layers) {
  run_ranks(over, 4, [&](const std::shared_ptr<Communicator>& world) {
    DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}});
    const at::Tensor x = random_rows(16, "x"), y = random_rows(16, "y");
    for (const auto& name : schedules) {
      for (const Layers whose : layers) {
        SCOPED_TRACE(name);
        const auto plan = make_schedule({.name = name, .ranks = 2, .micro_batches = 4});
        const auto stages = stages_of(plan, mesh.coordinate("pp"), whose);
        const auto module = std::make_shared<RankModule>(stages);
        DistributedDataParallel ddp(*module, mesh.communicator("dp"),
                                    {.first_bucket_bytes = 1024, .bucket_bytes = 1024});
        PipelineRuntime pipeline(mesh.communicator("pp"), plan, stages);
        const OneRank reference = one_rank(whose, 8);
        const auto half = static_cast<std::size_t>(mesh.coordinate("dp"));
        for (int step = 0; step < 3; ++step) {
          const auto expected = reference.step(x, y);
          pipeline.step(x.chunk(2)[half], y.chunk(2)[half]);
          for (const auto& [key, p] : parameters_of(stages)) {
            EXPECT_LE(relative_difference(p.grad(), reference.parameters().at(key).grad()), 2e-6) << key;
          }
          EXPECT_EQ(ddp.statistics().synchronisations, step + 1);
          descend(parameters_of(stages), 0.1);
          descend(reference.parameters(), 0.1);
        }
      }
    }
  });
}

TEST(Pipeline, DataParallelOnTop) {
  expect_data_parallel_on_top(Over::local, schedules_for(2), {Layers::own, Layers::foreign});
}
TEST(PipelineOverNccl, DataParallelOnTop) {
  expect_data_parallel_on_top(Over::nccl, {"1F1B", "ZBVZeroBubble"}, {Layers::own});
}

TEST(Pipeline, ShardingActionsCallTheirHooks) {
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    auto with = schedule::add_transfers(make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 2}));
    for (int rank = 0; rank < 2; ++rank) {
      auto& row = with.actions[static_cast<std::size_t>(rank)];
      row.insert(row.begin(), {rank, schedule::ActionKind::unshard, -1, {}});
      row.push_back({rank, schedule::ActionKind::reduce_gradients, -1, {}});
      row.push_back({rank, schedule::ActionKind::reshard, -1, {}});
    }
    std::string calls;
    PipelineRuntime pipeline(comm, with, stages_of(with, comm->rank(), Layers::own),
                             {.unshard = [&](int stage) { calls += "u" + std::to_string(stage); },
                              .reshard = [&](int stage) { calls += "r" + std::to_string(stage); },
                              .reduce_gradients = [&](int stage) { calls += "g" + std::to_string(stage); }});
    pipeline.step(random_rows(4, "x"), random_rows(4, "y"));
    EXPECT_EQ(calls, comm->rank() == 0 ? "u0g0r0" : "u1g1r1");
  });
}

void expect_a_failing_stage_to_be_named(Over over) {
  const auto body = [](const std::shared_ptr<Communicator>& comm) {
    const auto plan = make_schedule({.name = "1F1B", .ranks = 4, .micro_batches = 4});
    auto stages = stages_of(plan, comm->rank(), Layers::own);
    if (comm->rank() == 2) {
      stages[0].forward = [calls = 0, forward = stages[0].forward](const at::Tensor& x) mutable {
        if (++calls == 2) throw std::runtime_error("out of luck");
        return forward(x);
      };
    }
    PipelineRuntime pipeline(comm, plan, stages);
    pipeline.step(random_rows(8, "x"), random_rows(8, "y"));
  };
  for (const auto& error : errors_of(4, body, over)) {
    EXPECT_THAT(error, HasSubstr("pipeline stage 2, rank 2, 2F1: out of luck"));
  }
}

TEST(PipelineErrors, AFailingStageIsNamedOnEveryRank) { expect_a_failing_stage_to_be_named(Over::local); }
TEST(PipelineErrors, AFailingStageIsNamedOnEveryRankOverNccl) { expect_a_failing_stage_to_be_named(Over::nccl); }

TEST(PipelineErrors, AnotherShapeIsNamedOnEveryRank) {
  const auto errors = errors_of(2, [](const std::shared_ptr<Communicator>& comm) {
    const auto plan = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 3});
    PipelineRuntime pipeline(comm, plan, stages_of(plan, comm->rank(), Layers::own));
    const std::vector<at::Tensor> x = {random_rows(2, "a"), random_rows(2, "b"), random_rows(3, "c")};
    pipeline.step(x, x);
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error, HasSubstr("stage 0, rank 0, 0F2: micro-batch 2: the input of stage 0 is Float [3, 12], expected "
                                 "Float [2, 12]"));
  }
  const auto later = errors_of(2, [](const std::shared_ptr<Communicator>& comm) {
    const auto plan = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 2});
    PipelineRuntime pipeline(comm, plan, stages_of(plan, comm->rank(), Layers::own));
    pipeline.step(random_rows(4, "x"), random_rows(4, "x"));
    pipeline.step(random_rows(6, "x"), random_rows(6, "x"));
  });
  for (const auto& error : later) {
    EXPECT_THAT(error, HasSubstr("micro-batch 0: the output of stage 0 is Float [3, 12], expected Float [2, 12] as in "
                                 "the first micro-batch"));
  }
}

TEST(PipelineErrors, BatchesThatCannotBeCut) {
  const auto errors = errors_of(2, [](const std::shared_ptr<Communicator>& comm) {
    const auto plan = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 3});
    PipelineRuntime pipeline(comm, plan, stages_of(plan, comm->rank(), Layers::own));
    pipeline.step(comm->rank() == 0 ? random_rows(4, "x") : at::Tensor(), random_rows(6, "y"));
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error,
                HasSubstr("inputs of shape [4, 12] cannot be cut into 3 equal micro-batches: 4 is no multiple of 3"));
  }
  const auto none = errors_of(2, [](const std::shared_ptr<Communicator>& comm) {
    const auto plan = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 3});
    PipelineRuntime pipeline(comm, plan, stages_of(plan, comm->rank(), Layers::own));
    pipeline.step(random_rows(6, "x"), at::Tensor());
  });
  for (const auto& error : none)
    EXPECT_THAT(error, HasSubstr("holds stage 1 and needs the targets of 3 micro-batches"));
}

TEST(PipelineErrors, StagesThatDoNotFitTheSchedule) {
  const auto plan = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 2});
  auto errors = errors_of(1, [&](const std::shared_ptr<Communicator>& comm) { PipelineRuntime(comm, plan, {}); });
  EXPECT_THAT(errors[0], HasSubstr("schedule 'GPipe' is for 2 ranks, and there are 1"));
  errors = errors_of(2, [&](const std::shared_ptr<Communicator>& comm) {
    PipelineRuntime(comm, plan, stages_of(plan, 0, Layers::own));
  });
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("rank 1 has the stages [1], and was given [0]"));
  errors = errors_of(2, [&](const std::shared_ptr<Communicator>& comm) {
    auto stages = stages_of(plan, comm->rank(), Layers::own);
    stages[0].loss = nullptr;
    PipelineRuntime(comm, plan, stages);
  });
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("stage 1, the last one, has no loss"));
  errors = errors_of(2, [&](const std::shared_ptr<Communicator>& comm) {
    auto stages = stages_of(plan, comm->rank(), Layers::own);
    const auto other = std::make_shared<nn::Linear>(nn::LinearOptions{3, comm->rank() == 0 ? 4 : 5});
    stages[0].module = other;
    PipelineRuntime(comm, plan, stages);
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error, HasSubstr("parameter 'weight' is Float [4, 3] on stage 0 and Float [5, 3] on stage 1"));
  }
}

TEST(PipelineErrors, AParameterThatDataParallelismWaitsForInVain) {
  const auto errors = errors_of(2, [](const std::shared_ptr<Communicator>& comm) {
    const auto plan = make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 2});
    auto stages = stages_of(plan, comm->rank(), Layers::own);
    if (comm->rank() == 0)
      stages[0].module->register_module("unused", std::make_shared<nn::Linear>(nn::LinearOptions{2, 2}));
    const auto alone = comm->split(comm->rank(), 0);
    DistributedDataParallel ddp(*stages[0].module, alone);
    PipelineRuntime pipeline(comm, plan, stages);
    pipeline.step(random_rows(4, "x"), random_rows(4, "y"));
  });
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("no micro-batch gave a gradient to 'unused.weight'"));
}

}  // namespace
}  // namespace phalanx
