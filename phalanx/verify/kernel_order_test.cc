// Which communicators a rank uses, and in which order. A device may run the kernels of all its communicators one after
// the other, as they were issued. Then ranks that share two communicators must issue their operations in one order, or
// they wait forever. Every layout trains and validates on such devices and gives the same numbers as elsewhere. They
// use a double of NCCL, whose messages have no tags and wait for their receives (comm/testing/nccl_ranks.h).
// docs/cuda_communication.md lists the communicators.
#include <ATen/Parallel.h>

#include <chrono>
#include <utility>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/testing/nccl_ranks.h"
#include "phalanx/parallel/replica_check.h"
#include "phalanx/train/testing/trainer_test_support.h"
#include "phalanx/train/validation.h"
#include "phalanx/verify/layout_side.h"

namespace phalanx::verify {
namespace {

using namespace std::chrono_literals;

class KernelOrderTest : public train::TrainerTest {
 protected:
  config::TrainConfig config_of(const std::vector<std::string>& keys) const {
    std::vector<std::string> all = {"--model.flavor=debug",
                                    "--training.dataset_path=" + path("tokens.bin"),
                                    "--training.seq_len=16",
                                    "--training.local_batch_size=2",
                                    "--training.global_batch_size=16",
                                    "--training.steps=4",
                                    "--lr_scheduler.warmup_steps=1",
                                    "--validation.enable",
                                    "--validation.steps=1",
                                    "--parallelism.pipeline_parallel_microbatch_size=1"};
    for (const std::string& key : keys) all.push_back("--" + key);
    return config::parse_config("", "test", all);
  }

  /// Of two steps and a validation, on every rank.
  static std::vector<double> numbers_of(const config::TrainConfig& config, const std::shared_ptr<Communicator>& world) {
    at::set_num_threads(1);
    LayoutSide side(config, world, at::kCPU);
    std::vector<double> numbers;
    for (std::int64_t step = 0; step < 2; ++step) {
      numbers.push_back(side.forward_backward(step));
      check_replicas(side.model->replicated_weights(), *world, "of the test");
      numbers.push_back(side.optimizer_step->apply(step).grad_norm);
    }
    numbers.push_back(side.data.validator->run(*side.model, *world, 2).value().loss);
    return numbers;
  }

  void expect_one_order(int ranks, const std::vector<std::string>& keys) const {
    const config::TrainConfig config = config_of(keys);
    std::vector<std::vector<double>> expected(static_cast<std::size_t>(ranks));
    run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
      expected[static_cast<std::size_t>(world->rank())] = numbers_of(config, world);
    });
    const auto body = [&](const NcclRank& rank) {
      const auto found = numbers_of(config, rank.comm);
      const auto& mine = expected[static_cast<std::size_t>(rank.comm->rank())];
      ASSERT_EQ(found.size(), mine.size());
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], mine[i], 1e-4 * mine[i]);
    };
    EXPECT_EQ(run_nccl_threads(ranks, body, {.communicator = {.first_timeout = 60s, .timeout = 60s}},
                               FakeStreams::Kernels::one_at_a_time),
              "");
  }

  static std::string degree(const std::string& axis, int degree) {
    return "parallelism." + axis + "_degree=" + std::to_string(degree);
  }
  const std::string replicas = degree("data_parallel_replicate", 2), shards = degree("data_parallel_shard", 2),
                    tp = degree("tensor_parallel", 2), pp = degree("pipeline_parallel", 2),
                    tied = "model.tie_embeddings", recomputes = "activation_checkpoint.mode=full";
};

TEST_F(KernelOrderTest, OfCopiesOfShards) {
  expect_one_order(4, {replicas, shards});
  expect_one_order(4, {replicas, shards, "parallelism.zero_stage=2", recomputes});
  expect_one_order(4, {replicas, shards, "parallelism.fsdp_reduce_each_microbatch=never"});
}

TEST_F(KernelOrderTest, OfGroupsThatKeepUnits) {
  expect_one_order(4, {degree("data_parallel_shard", 4), "parallelism.fsdp_reshard_after_forward=2"});
}

TEST_F(KernelOrderTest, OfTensorParallelism) {
  expect_one_order(4, {tp, tied});
  expect_one_order(4, {tp, shards, recomputes, "parallelism.no-enable_async_tensor_parallel"});
}

TEST_F(KernelOrderTest, OfPipelines) {
  expect_one_order(4, {pp, replicas, tied});
  expect_one_order(4, {pp, replicas, "parallelism.pipeline_parallel_schedule=ZBV", tied});
  expect_one_order(4, {pp, shards, "parallelism.pipeline_parallel_schedule=Interleaved1F1B"});
  expect_one_order(4, {pp, tp});
}

TEST_F(KernelOrderTest, OfAllAtOnce) {
  expect_one_order(8, {pp, tp, shards, tied});
  expect_one_order(8, {pp, replicas, shards, "parallelism.pipeline_parallel_schedule=ZB1P"});
}

// The double detects ranks whose orders differ.
TEST_F(KernelOrderTest, AnotherOrderOnOneRankWaitsForEver) {
  const auto body = [](const NcclRank& rank) {
    const auto one = rank.comm->split(0, rank.comm->rank()), other = rank.comm->split(0, rank.comm->rank());
    const bool is_first = rank.comm->rank() == 0;
    const at::Tensor x = at::ones({40}), y = at::ones({40});
    const Work a = (is_first ? one : other)->all_reduce(x, {.async = true});
    const Work b = (is_first ? other : one)->all_reduce(y, {.async = true});
    a.wait();
    b.wait();
  };
  const NcclOptions options{.communicator = {.first_timeout = 500ms, .timeout = 500ms}};
  EXPECT_EQ(run_nccl_threads(2, body), "");
  EXPECT_THAT(run_nccl_threads(2, body, options, FakeStreams::Kernels::one_at_a_time), HasSubstr("timed out after "));
}

}  // namespace
}  // namespace phalanx::verify
