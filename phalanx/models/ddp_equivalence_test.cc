// Data parallelism on the debug Llama against one rank: losses, gradients and weights of 50 steps, and bits between
// ranks and runs.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/remainder.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/local.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/optim/lr_schedule.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/ddp.h"

namespace phalanx {
namespace {

constexpr std::int64_t kLlamaBatch = 24, kLlamaSeq = 8;
constexpr int kLlamaSteps = 50;

struct LlamaRun {
  std::vector<double> losses;  // of the global batch
  std::vector<double> norms;
  std::vector<NamedTensor> first_grads;  // at the initial weights
  std::vector<NamedTensor> weights;      // after the last step
  double summed_rates = 0;
};

// [batch, seq + 1]: arithmetic progressions modulo a small number, so that there is something to learn.
at::Tensor llama_tokens(int step) {
  const at::Tensor row = at::arange(kLlamaBatch, at::kLong).add(kLlamaBatch * step).unsqueeze(1);
  const at::Tensor column = at::arange(kLlamaSeq + 1, at::kLong).unsqueeze(0);
  return at::remainder(row.mul(7).add(column.mul(row.remainder(3).add(1))), 61);
}

std::vector<NamedTensor> copies_of(const std::vector<NamedTensor>& tensors, bool of_grads) {
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor] : tensors) {
    result.push_back({name, (of_grads ? tensor.grad() : tensor).detach().clone()});
  }
  return result;
}

LlamaRun train_llama(const std::shared_ptr<Communicator>& comm, bool adamw) {
  models::Llama model(models::llama_flavor("debug"));
  nn::initialise(model, /*seed=*/comm->rank() + 1);  // rank 0's start counts
  DistributedDataParallel ddp(model, comm, {.first_bucket_bytes = 50'000, .bucket_bytes = 200'000});
  std::unique_ptr<Optimizer> optimizer;
  if (adamw) {
    optimizer = std::make_unique<AdamW>(ddp.parameters());
  } else {
    optimizer = std::make_unique<Sgd>(ddp.parameters(), SgdOptions{.momentum = 0.9});
  }
  const LearningRateSchedule schedule(
      {.base_lr = adamw ? 2e-3 : 0.03, .total_steps = kLlamaSteps, .warmup_steps = 5, .min_lr_factor = 0.1});
  const std::int64_t share = kLlamaBatch / comm->size();
  LlamaRun run;
  for (int step = 0; step < kLlamaSteps; ++step) {
    const at::Tensor tokens = llama_tokens(step).narrow(0, comm->rank() * share, share);
    const at::Tensor loss = model.loss(tokens.narrow(1, 0, kLlamaSeq), tokens.narrow(1, 1, kLlamaSeq));
    loss.backward();
    const at::Tensor mean = loss.detach().to(at::kDouble).clone();
    comm->all_reduce(mean, {.op = ReduceOp::avg});
    run.losses.push_back(mean.item<double>());
    if (step == 0) run.first_grads = copies_of(ddp.parameters(), /*of_grads=*/true);
    run.norms.push_back(clip_grad_norm(ddp.parameters(), 1.0).value());
    run.summed_rates += schedule.lr_at(step);
    optimizer->step(schedule.lr_at(step));
    optimizer->zero_grad();
  }
  EXPECT_GT(ddp.buckets().size(), 2U);
  run.weights = copies_of(ddp.parameters(), /*of_grads=*/false);
  return run;
}

std::vector<LlamaRun> llama_runs(int world, bool adamw) {
  std::vector<LlamaRun> runs(static_cast<std::size_t>(world));
  run_local_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
    runs[static_cast<std::size_t>(comm->rank())] = train_llama(comm, adamw);
  });
  return runs;
}

void expect_same_bits(const LlamaRun& a, const LlamaRun& b, const std::string& what) {
  SCOPED_TRACE(what);
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  for (std::size_t i = 0; i < a.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(a.first_grads[i].tensor, b.first_grads[i].tensor)) << a.weights[i].name;
    EXPECT_TRUE(at::equal(a.weights[i].tensor, b.weights[i].tensor)) << a.weights[i].name;
  }
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  return a.sub(b).to(at::kDouble).norm().item<double>() / b.to(at::kDouble).norm().item<double>();
}

class DdpLlama : public ::testing::TestWithParam<bool> {};

TEST_P(DdpLlama, EveryWorldTrainsAsOneRankDoes) {
  const bool adamw = GetParam();
  const LlamaRun one = llama_runs(1, adamw)[0];
  EXPECT_LT(one.losses.back(), 0.8 * one.losses.front());  // it learns: later steps depend on earlier ones
  for (const int world : {2, 3, 4, 8}) {
    SCOPED_TRACE("world " + std::to_string(world));
    const auto runs = llama_runs(world, adamw);
    for (std::size_t rank = 1; rank < runs.size(); ++rank) {
      expect_same_bits(runs[rank], runs[0], "rank " + std::to_string(rank) + " against rank 0");
    }
    if (world == 3) expect_same_bits(llama_runs(world, adamw)[0], runs[0], "a second run");
    for (std::size_t step = 0; step < one.losses.size(); ++step) {
      EXPECT_NEAR(runs[0].losses[step], one.losses[step], 1e-5 * one.losses[step]) << "step " << step;
    }
    for (std::size_t i = 0; i < one.weights.size(); ++i) {
      SCOPED_TRACE(one.weights[i].name);
      const double largest = runs[0].weights[i].tensor.sub(one.weights[i].tensor).abs().max().item<double>();
      EXPECT_LT(relative_error(runs[0].first_grads[i].tensor, one.first_grads[i].tensor), 1e-5);
      if (adamw) {
        EXPECT_LT(relative_error(runs[0].weights[i].tensor, one.weights[i].tensor), 2e-5);
        EXPECT_LT(largest, 0.2 * one.summed_rates);
      } else {
        EXPECT_LT(largest, 1e-6);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, DdpLlama, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "AdamW" : "Sgd"; });

}  // namespace
}  // namespace phalanx
