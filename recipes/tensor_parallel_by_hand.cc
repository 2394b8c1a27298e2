// Tensor parallelism written out, forward and backward, on the deep MLP of the other recipes.
//
// Columns: every rank holds dim / ranks columns of each matrix and computes these columns of gelu(x W), which are
// all-gathered in each layer. Backward, the gradient of x is the sum of the ranks' parts.
// Pairs: the columns of one matrix and the rows of the next. Z = s(A x) B = sum over ranks of s(A_i x) B_i. So two
// layers need one all-reduce, and backward one more. Both print what autograd computes on one rank. --per-rank shows
// the activations of each rank in the first step. Worlds of 1, 2 and 4: tensor_parallel_by_hand --spawn 1,2,4.
// Below, "..." stands for lines left out; recipes/expected/tensor_parallel_by_hand.txt has them all.
//
//   $ phalanx launch --nproc-per-node 2 -- tensor_parallel_by_hand --per-rank
//   rank 0: columns, layer 0: 128 x 512 [0.022 0.903 -0.148 ...]
//   rank 0: columns, layer 1: 128 x 512 [-0.101 0.520 -0.170 ...]
//   ...
//   rank 1: columns, layer 0: 128 x 512 [-0.144 -0.099 0.490 ...]
//   ...
//   rank 0: pairs, layer 0: 128 x 512 [0.022 0.903 -0.148 ...]
//   rank 0: pairs, layer 1: 128 x 1024 [-0.101 0.520 -0.170 ...]
//   ...
//   rank 1: pairs, layer 0: 128 x 512 [-0.144 -0.099 0.490 ...]
//   ...
//   step 1: columns 0.0130475, pairs 0.0130475, one rank 0.0130475
//   step 2: columns 0.0033893, pairs 0.0033893, one rank 0.0033893
//   step 3: columns 0.0015080, pairs 0.0015080, one rank 0.0015080
//   step 4: columns 0.0010713, pairs 0.0010713, one rank 0.0010713
//   step 5: columns 0.0008396, pairs 0.0008396, one rank 0.0008396
//   2 rank(s): losses differ from one rank's by 1.4e-07: the same
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu_backward.h>

#include <functional>

#include "recipes/deep_mlp.h"
#include "recipes/recipe.h"

namespace {

using Tensors = std::vector<at::Tensor>;
/// Sets the weights' gradients, appends the activations to `seen`, and returns the loss.
using Pass = std::function<at::Tensor(const Tensors& weights, const at::Tensor& x, Tensors& seen)>;

/// This rank's part of [batch, dim], and the whole tensor from all ranks' parts.
struct Columns {
  phalanx::Communicator& world;
  std::int64_t width() const { return deep_mlp::kDim / world.size(); }
  at::Tensor mine(const at::Tensor& x) const { return x.narrow(1, world.rank() * width(), width()); }
  at::Tensor gathered(const at::Tensor& part) const {
    Tensors parts;
    const at::Tensor all = at::empty({world.size(), part.size(0), width()}, part.options());
    world.all_gather(all, part.contiguous());
    for (int r = 0; r < world.size(); ++r) parts.push_back(all[r]);
    return at::cat(parts, 1);
  }
};

at::Tensor by_columns(const Tensors& weights, at::Tensor x, const Columns& columns, Tensors& seen) {
  Tensors inputs, sums;  // of each layer: x [batch, dim], x W [batch, dim / ranks]
  for (const at::Tensor& weight : weights) {
    inputs.push_back(x);
    sums.push_back(at::mm(x, weight));
    seen.push_back(at::gelu(sums.back()));
    x = columns.gathered(seen.back());
  }
  at::Tensor dx = x * (2.0 / static_cast<double>(x.numel()));  // of mean(x^2), the same on every rank
  for (std::size_t i = weights.size(); i-- > 0;) {
    const at::Tensor dsum = at::gelu_backward(columns.mine(dx).contiguous(), sums[i]);
    weights[i].mutable_grad() = at::mm(inputs[i].t(), dsum);
    dx = at::mm(dsum, weights[i].t());
    columns.world.all_reduce(dx);
  }
  return deep_mlp::loss_of(x);
}

at::Tensor by_pairs(const Tensors& weights, at::Tensor x, phalanx::Communicator& world, Tensors& seen) {
  Tensors inputs, first_sums, inner, second_sums;
  for (std::size_t i = 0; i < weights.size(); i += 2) {
    inputs.push_back(x);
    first_sums.push_back(at::mm(x, weights[i]));  // [batch, dim / ranks]
    inner.push_back(at::gelu(first_sums.back()));
    second_sums.push_back(at::mm(inner.back(), weights[i + 1]));  // [batch, dim], this rank's part of the sum
    world.all_reduce(second_sums.back());
    x = at::gelu(second_sums.back());
    seen.insert(seen.end(), {inner.back(), x});
  }
  at::Tensor dx = x * (2.0 / static_cast<double>(x.numel()));
  for (std::size_t pair = inputs.size(); pair-- > 0;) {
    const at::Tensor &first = weights[2 * pair], &second = weights[2 * pair + 1];
    const at::Tensor dsecond = at::gelu_backward(dx, second_sums[pair]);
    second.mutable_grad() = at::mm(inner[pair].t(), dsecond);
    const at::Tensor dfirst = at::gelu_backward(at::mm(dsecond, second.t()), first_sums[pair]);
    first.mutable_grad() = at::mm(inputs[pair].t(), dfirst);
    dx = at::mm(dfirst, first.t());
    world.all_reduce(dx);
  }
  return deep_mlp::loss_of(x);
}

/// This rank's parts of the matrices, cut along `dims`, one for each layer.
Tensors parts_of_weights(const std::vector<int>& dims, const phalanx::ProcessContext& context) {
  deep_mlp::Net net(context.device);
  phalanx::nn::initialise(net, deep_mlp::kSeed);
  Tensors weights;
  for (std::size_t i = 0; i < net.layers.size(); ++i) {
    const std::int64_t part = deep_mlp::kDim / context.world_size;
    const at::Tensor mine = net.layers[i]->weight.detach().narrow(dims[i], context.rank * part, part).clone();
    weights.push_back(mine.set_requires_grad(true));
  }
  return weights;
}

recipe::Losses train(const char* name, const std::vector<int>& dims, const phalanx::ProcessContext& context,
                     bool per_rank, const Pass& pass) {
  const Tensors weights = parts_of_weights(dims, context);
  std::vector<phalanx::NamedTensor> parameters;
  for (std::size_t i = 0; i < weights.size(); ++i) parameters.push_back({std::to_string(i), weights[i]});
  const at::Tensor x = deep_mlp::rows_of(0, 1, context.device);
  bool is_first_step = true;
  const at::NoGradGuard by_hand;
  return {name, deep_mlp::train(parameters, [&] {
            Tensors seen;
            const at::Tensor loss = pass(weights, x, seen);
            if (per_rank && is_first_step) recipe::print_by_rank(*context.world, name, seen);
            is_first_step = false;
            return loss.item<double>();
          })};
}

bool compare(const phalanx::ProcessContext& context, bool per_rank) {
  auto& world = *context.world;
  recipe::share_of(deep_mlp::kDim, world.size(), "columns of a matrix");
  const auto columns = train("columns", {1, 1, 1, 1}, context, per_rank, [&](const auto& w, const auto& x, auto& seen) {
    return by_columns(w, x, Columns{world}, seen);
  });
  const auto pairs = train("pairs", {1, 0, 1, 0}, context, per_rank,
                           [&](const auto& w, const auto& x, auto& seen) { return by_pairs(w, x, world, seen); });
  if (context.rank != 0) return true;
  return recipe::print_beside_one_rank(world.size(),
                                       {columns, pairs, {"one rank", deep_mlp::train_alone(context.device)}});
}

}  // namespace

int main(int argc, char** argv) {
  recipe::Program program;
  const bool& per_rank = program.add_per_rank_flag();
  return program.run(argc, argv, [&](const auto& context) { return compare(context, per_rank); });
}
