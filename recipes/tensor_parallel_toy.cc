// Tensor parallelism in two lines: a net of two layers whose matrices are split over the ranks.
//
//   phalanx launch --nproc-per-node 2 -- tensor_parallel_toy              also with 1 and 4
//
// in_proj is split by columns of its output and out_proj by rows of its input, so only one all-reduce per pass is sent.
// First all ranks have the same input. Then sequence-parallel: every rank has its own rows, which are all-gathered
// before in_proj and reduce-scattered after out_proj. Rank 0 alone, on all rows, gets the same losses.
#include <ATen/ops/empty.h>
#include <ATen/ops/relu.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/tensor/styles.h"

namespace {

constexpr int kSteps = 10;
constexpr std::int64_t kRowsOfARank = 20;

struct Toy : phalanx::nn::Module {
  Toy() : Module("Toy") {
    in_proj =
        register_module("in_proj", std::make_shared<phalanx::nn::Linear>(phalanx::nn::LinearOptions{10, 32, true}));
    out_proj =
        register_module("out_proj", std::make_shared<phalanx::nn::Linear>(phalanx::nn::LinearOptions{32, 5, true}));
    for (const auto& layer : {in_proj, out_proj}) layer->set_init("weight", phalanx::Init::uniform(-0.3, 0.3));
  }
  at::Tensor forward(const at::Tensor& x) {
    return phalanx::nn::call(out_proj, at::relu(phalanx::nn::call(in_proj, x)));
  }
  std::shared_ptr<phalanx::nn::Linear> in_proj, out_proj;
};

at::Tensor rows(int step, std::int64_t first, std::int64_t count) {
  const at::Tensor x = at::empty({count, 10});
  phalanx::fill(x, phalanx::Init::uniform(0.0, 1.0), 7, fmt::format("rows of step {}", step), first * 10);
  return x;
}

// Losses of ten steps. `mesh` null: of one rank. `first` and `count`: the rows of this rank.
std::vector<double> train(const phalanx::DeviceMesh* mesh, const std::vector<phalanx::ParallelStyle>& plan,
                          std::int64_t first, std::int64_t count, bool sums_losses) {
  Toy net;
  if (mesh != nullptr) phalanx::parallelize_module(net, *mesh, plan);
  phalanx::nn::initialise(net, /*seed=*/1);
  phalanx::AdamW optimizer(phalanx::nn::named_parameters(net));
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor loss = phalanx::nn::call(net, rows(step, first, count)).square().sum();
    loss.backward();
    optimizer.step(0.25);
    optimizer.zero_grad();
    at::Tensor total = loss.detach().clone();
    if (sums_losses) mesh->communicator("tp")->all_reduce(total);
    losses.push_back(total.item<double>());
  }
  return losses;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]) / b[i]);
  return largest;
}

}  // namespace

int main() try {
  using phalanx::ColwiseParallel, phalanx::RowwiseParallel, phalanx::ActivationLayout;
  const phalanx::ProcessContext context = phalanx::init_from_environment({.device = "cpu"});
  const int ranks = context.world_size;
  const phalanx::DeviceMesh mesh(context.world, {{"tp", ranks}});

  const auto tensor =
      train(&mesh, {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}}, 0, kRowsOfARank, false);
  const auto one = train(nullptr, {}, 0, kRowsOfARank, false);
  const std::vector<phalanx::ParallelStyle> by_rows = {
      {"in_proj", ColwiseParallel{.input = ActivationLayout::split(0)}},
      {"out_proj", RowwiseParallel{.output = ActivationLayout::split(0)}}};
  const auto sequence = train(&mesh, by_rows, context.rank * kRowsOfARank, kRowsOfARank, true);
  const auto one_of_all = train(nullptr, {}, 0, ranks * kRowsOfARank, false);

  const double apart = std::max(largest_difference(tensor, one), largest_difference(sequence, one_of_all));
  const bool good = apart < 1e-3;  // not so for NaN
  if (context.rank == 0) {
    for (int step = 0; step < kSteps; ++step) {
      const auto i = static_cast<std::size_t>(step);
      fmt::print("step {:2}: tensor-parallel {:.5g}, one rank {:.5g}; sequence-parallel {:.5g}, one rank {:.5g}\n",
                 step + 1, tensor[i], one[i], sequence[i], one_of_all[i]);
    }
    fmt::print("{} rank(s), {} of in_proj's 32 rows each: losses differ by {:.1e}: {}\n", ranks, 32 / ranks, apart,
               good ? "the same" : "NOT the same");
  }
  return good ? 0 : 1;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "tensor_parallel_toy: {}\n", error.what());
  return error.exit_status();
}
