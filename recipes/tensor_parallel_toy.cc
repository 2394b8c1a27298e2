// Tensor parallelism in two lines: a net of two layers whose matrices are split over the ranks.
//
// in_proj is split by columns of its output and out_proj by rows of its input, so only one all-reduce per pass is sent.
// First all ranks have the same input. Then sequence-parallel: every rank has its own rows, which are all-gathered
// before in_proj and reduce-scattered after out_proj. Rank 0 alone, on all rows, gets the same losses.
//
// The learning rate is that of the original, 0.25. At it the net does not learn: AdamW's first step throws the loss
// from 1.4 to 696, and after ten steps it is still seven times that of the start.
//
//   $ phalanx launch --nproc-per-node 2 -- tensor_parallel_toy
//   step 1: tensor-parallel 1.4491357, one rank 1.4491357
//   step 2: tensor-parallel 696.0693359, one rank 696.0693359
//   step 3: tensor-parallel 39.2509117, one rank 39.2509117
//   step 4: tensor-parallel 4.1275516, one rank 4.1275516
//   step 5: tensor-parallel 4.1958151, one rank 4.1958151
//   step 6: tensor-parallel 5.8351655, one rank 5.8351655
//   step 7: tensor-parallel 7.5957613, one rank 7.5957613
//   step 8: tensor-parallel 9.0448761, one rank 9.0448761
//   step 9: tensor-parallel 9.9047766, one rank 9.9047766
//   step 10: tensor-parallel 10.0386200, one rank 10.0386200
//   step 1: sequence-parallel 3.2180421, one rank 3.2180421
//   step 2: sequence-parallel 1555.1815186, one rank 1555.1816406
//   step 3: sequence-parallel 23.7446632, one rank 23.7446632
//   step 4: sequence-parallel 74.4862366, one rank 74.4862213
//   step 5: sequence-parallel 21.7930641, one rank 21.7930622
//   step 6: sequence-parallel 9.5648565, one rank 9.5648556
//   step 7: sequence-parallel 13.1903343, one rank 13.1903315
//   step 8: sequence-parallel 15.1885681, one rank 15.1885672
//   step 9: sequence-parallel 15.4165964, one rank 15.4165974
//   step 10: sequence-parallel 14.0948372, one rank 14.0948372
//   2 rank(s), 16 of in_proj's 32 rows each: losses differ by 2.2e-07: the same
//
// At 0.01 it learns: after ten steps the loss is a seventh of that of the start. "..." stands for lines left out;
// recipes/expected/tensor_parallel_toy.txt has them all.
//
//   $ phalanx launch --nproc-per-node 2 -- tensor_parallel_toy --lr 0.01
//   step 1: tensor-parallel 1.4491357, one rank 1.4491357
//   ...
//   step 10: tensor-parallel 0.2195491, one rank 0.2195491
//   step 1: sequence-parallel 3.2180421, one rank 3.2180421
//   ...
//   step 10: sequence-parallel 0.5155792, one rank 0.5155792
//   2 rank(s), 16 of in_proj's 32 rows each: losses differ by 2.2e-07: the same
#include <ATen/ops/empty.h>
#include <ATen/ops/relu.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/tensor/styles.h"
#include "recipes/recipe.h"

namespace {

constexpr int kSteps = 10;
constexpr std::int64_t kRowsOfARank = 20;

struct Toy : phalanx::nn::Module {
  explicit Toy(at::Device device) : Module("Toy") {
    using phalanx::nn::Linear, phalanx::nn::LinearOptions;
    const phalanx::nn::TensorOptionsOfModule here{.device = device};
    in_proj = register_module("in_proj", std::make_shared<Linear>(LinearOptions{10, 32, true}, here));
    out_proj = register_module("out_proj", std::make_shared<Linear>(LinearOptions{32, 5, true}, here));
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

struct Training {
  at::Device device;
  double lr;
  /// Losses of ten steps. `mesh` null: of one rank. `first` and `count`: the rows of this rank.
  std::vector<double> losses(const phalanx::DeviceMesh* mesh, const std::vector<phalanx::ParallelStyle>& plan,
                             std::int64_t first, std::int64_t count, bool sums_losses = false) const {
    Toy net(device);
    if (mesh != nullptr) phalanx::parallelize_module(net, *mesh, plan);
    phalanx::nn::initialise(net, /*seed=*/1);
    phalanx::AdamW optimizer(phalanx::nn::named_parameters(net));
    std::vector<double> losses;
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor loss = phalanx::nn::call(net, rows(step, first, count).to(device)).square().sum();
      loss.backward();
      optimizer.step(lr);
      optimizer.zero_grad();
      at::Tensor total = loss.detach().clone();
      if (sums_losses) mesh->communicator("tp")->all_reduce(total);
      losses.push_back(total.item<double>());
    }
    return losses;
  }
};

bool compare(const phalanx::ProcessContext& context, double lr) {
  using phalanx::ColwiseParallel, phalanx::RowwiseParallel, phalanx::ActivationLayout;
  const int ranks = context.world_size;
  const phalanx::DeviceMesh mesh(context.world, {{"tp", ranks}});
  const Training training{context.device, lr};

  const auto tensor =
      training.losses(&mesh, {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}}, 0, kRowsOfARank);
  const std::vector<phalanx::ParallelStyle> by_rows = {
      {"in_proj", ColwiseParallel{.input = ActivationLayout::split(0)}},
      {"out_proj", RowwiseParallel{.output = ActivationLayout::split(0)}}};
  const auto sequence = training.losses(&mesh, by_rows, context.rank * kRowsOfARank, kRowsOfARank, true);
  if (context.rank != 0) return true;
  const auto one = training.losses(nullptr, {}, 0, kRowsOfARank);
  const auto one_of_all = training.losses(nullptr, {}, 0, ranks * kRowsOfARank);

  double apart = recipe::print_losses({{"tensor-parallel", tensor}, {"one rank", one}});
  apart = std::max(apart, recipe::print_losses({{"sequence-parallel", sequence}, {"one rank", one_of_all}}));
  fmt::print("{} rank(s), {} of in_proj's 32 rows each: losses differ by {:.1e}: {}\n", ranks, 32 / ranks, apart,
             recipe::verdict(apart < 1e-3));
  return apart < 1e-3;
}

}  // namespace

int main(int argc, char** argv) {
  double lr = 0.25;
  recipe::Program program;
  program.add_option("--lr", lr, "of AdamW")->check(recipe::positive());
  return program.run(argc, argv, [&](const auto& context) { return compare(context, lr); });
}
