// Data parallelism against one rank: losses, gradients and weights of a training run, and bits between ranks and runs.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>

#include <cmath>
#include <mutex>

#include "phalanx/optim/adamw.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/testing/ddp_test_support.h"

namespace phalanx {
namespace {

using ddp_testing::Mlp;
using ddp_testing::waves;

constexpr std::int64_t kGlobalBatch = 24;
constexpr int kSteps = 50;
constexpr double kRate = 0.01;

enum class With { adamw, sgd };

struct MlpRun {
  std::vector<double> losses;            // of the global batch
  std::vector<NamedTensor> first_grads;  // at the initial weights
  std::vector<NamedTensor> weights;      // after the last step
};

std::vector<NamedTensor> clones(const std::vector<NamedTensor>& tensors, bool of_grads) {
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor, shard] : tensors)
    result.push_back({name, (of_grads ? tensor.grad() : tensor).detach().clone()});
  return result;
}

MlpRun train_mlp(const std::shared_ptr<Communicator>& comm, With with) {
  Mlp model(4, 16, /*phase=*/comm->rank());  // rank 0's start counts
  DistributedDataParallel ddp(model, comm, {.first_bucket_bytes = 256, .bucket_bytes = 1024});
  std::unique_ptr<Optimizer> optimizer;
  if (with == With::adamw) {
    optimizer = std::make_unique<AdamW>(ddp.parameters());
  } else {
    optimizer = std::make_unique<Sgd>(ddp.parameters(), SgdOptions{.momentum = 0.9});
  }
  const std::int64_t share = kGlobalBatch / comm->size();
  MlpRun run;
  for (int step = 0; step < kSteps; ++step) {
    const auto x = waves({kGlobalBatch, 16}, step * 0.37), y = x.narrow(1, 3, 1).mul(0.7);
    const auto loss = model.loss(x.narrow(0, comm->rank() * share, share), y.narrow(0, comm->rank() * share, share));
    loss.backward();
    const at::Tensor mean = loss.detach().to(at::kDouble).clone();
    comm->all_reduce(mean, {.op = ReduceOp::avg});
    run.losses.push_back(mean.item<double>());
    if (step == 0) run.first_grads = clones(ddp.parameters(), /*of_grads=*/true);
    optimizer->step(kRate);
    optimizer->zero_grad();
  }
  run.weights = clones(ddp.parameters(), /*of_grads=*/false);
  return run;
}

std::vector<MlpRun> mlp_runs(int world, With with) {
  std::vector<MlpRun> runs(static_cast<std::size_t>(world));
  run_local_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
    runs[static_cast<std::size_t>(comm->rank())] = train_mlp(comm, with);
  });
  return runs;
}

double relative_norm(const at::Tensor& a, const at::Tensor& b) {
  return a.sub(b).to(at::kDouble).norm().item<double>() / b.to(at::kDouble).norm().item<double>();
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) { return a.sub(b).abs().max().item<double>(); }

void expect_bitwise(const MlpRun& a, const MlpRun& b, const std::string& what) {
  SCOPED_TRACE(what);
  EXPECT_EQ(a.losses, b.losses);
  for (std::size_t i = 0; i < a.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(a.first_grads[i].tensor, b.first_grads[i].tensor)) << a.weights[i].name;
    EXPECT_TRUE(at::equal(a.weights[i].tensor, b.weights[i].tensor)) << a.weights[i].name;
  }
}

class DdpEquivalence : public ::testing::TestWithParam<With> {};

TEST_P(DdpEquivalence, EveryWorldTrainsAsOneRankDoes) {
  const MlpRun one = mlp_runs(1, GetParam())[0];
  EXPECT_LT(one.losses.back(), 0.5 * one.losses.front());  // it does learn: later steps depend on earlier ones
  for (const int world : {2, 3, 4, 8}) {
    SCOPED_TRACE("world " + std::to_string(world));
    const auto runs = mlp_runs(world, GetParam());
    for (std::size_t rank = 1; rank < runs.size(); ++rank) {
      expect_bitwise(runs[rank], runs[0], "rank " + std::to_string(rank) + " against rank 0");
    }
    expect_bitwise(mlp_runs(world, GetParam())[0], runs[0], "a second run");
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(runs[0].losses[step], one.losses[step], 1e-5 * one.losses[step]) << "step " << step;
    }
    for (std::size_t i = 0; i < one.weights.size(); ++i) {
      SCOPED_TRACE(one.weights[i].name);
      EXPECT_LT(relative_norm(runs[0].first_grads[i].tensor, one.first_grads[i].tensor), 1e-5);
      if (GetParam() == With::adamw) {
        EXPECT_LT(relative_norm(runs[0].weights[i].tensor, one.weights[i].tensor), 2e-5);
        EXPECT_LT(largest_difference(runs[0].weights[i].tensor, one.weights[i].tensor), 0.2 * kRate * kSteps);
      } else {
        EXPECT_LT(largest_difference(runs[0].weights[i].tensor, one.weights[i].tensor), 1e-6);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, DdpEquivalence, ::testing::Values(With::adamw, With::sgd),
                         [](const auto& info) { return info.param == With::adamw ? "AdamW" : "Sgd"; });

TEST(DdpEquivalenceResume, ContinuesBitwiseFromItsState) {
  for (const int stop_at : {0, 1, 7}) {
    run_local_ranks(3, [&](const std::shared_ptr<Communicator>& comm) {
      const auto step = [&](Mlp& model, AdamW& optimizer, int at) {
        const auto x = waves({2, 16}, at + comm->rank() * 0.3), y = waves({2, 1}, at * 0.1 + comm->rank());
        model.loss(x, y).backward();
        optimizer.step(kRate);
        optimizer.zero_grad();
      };
      const auto state_of = [](const DistributedDataParallel& ddp, const AdamW& optimizer) {
        TrainState state{.tensors = with_prefix("model.", ddp.parameters())};
        optimizer.collect_state(state);
        ddp.collect_state(state);
        return state;
      };
      const DdpOptions options{.first_bucket_bytes = 256, .bucket_bytes = 1024};
      Mlp model(4, 16), other(4, 16, /*phase=*/5);
      DistributedDataParallel ddp(model, comm, options), resumed_ddp(other, comm, options);
      AdamW optimizer(ddp.parameters()), resumed(resumed_ddp.parameters());
      for (int at = 0; at < stop_at; ++at) step(model, optimizer, at);
      {
        const at::NoGradGuard no_grad;
        const auto saved = state_of(ddp, optimizer), loaded = state_of(resumed_ddp, resumed);
        for (std::size_t i = 0; i < saved.tensors.size(); ++i) loaded.tensors[i].tensor.copy_(saved.tensors[i].tensor);
      }
      for (int at = stop_at; at < stop_at + 5; ++at) {
        step(model, optimizer, at);
        step(other, resumed, at);
      }
      EXPECT_EQ(resumed_ddp.buckets(), ddp.buckets());
      for (std::size_t i = 0; i < ddp.parameters().size(); ++i) {
        EXPECT_TRUE(at::equal(ddp.parameters()[i].tensor, resumed_ddp.parameters()[i].tensor)) << i;
      }
    });
  }
}

}  // namespace
}  // namespace phalanx
