// Expert parallelism written out, forward and backward: a mixture of 8 experts whose tokens travel to the rank that has
// their expert, and whose results travel back.
//
// x -> h = x W -> the router picks the likeliest expert e of each row -> y = p_e gelu(h E_e), loss mean((y - x)^2).
// Each rank has a share of the rows, the whole of W and of the router, and a share of the experts. Autograd computes
// within a rank; every message is written here, also those of the backward pass. Gradients of experts are then
// complete, those of W and of the router are summed over the ranks. --per-rank shows where the rows of the first step
// go. Worlds of 1, 2 and 4: expert_parallel_by_hand --spawn 1,2,4.
//
//   $ phalanx launch --nproc-per-node 2 -- expert_parallel_by_hand --per-rank
//   rank 0: rows to each rank: 136 120; rows for each of its experts: 74 83 65 58
//   rank 1: rows to each rank: 144 112; rows for each of its experts: 71 50 51 60
//   step 1: divided 1.0584457, one rank 1.0584456
//   step 2: divided 0.9986297, one rank 0.9986297
//   step 3: divided 0.9733984, one rank 0.9733984
//   step 4: divided 0.9485581, one rank 0.9485581
//   step 5: divided 0.9145752, one rank 0.9145753
//   2 rank(s): losses differ from one rank's by 1.1e-07: the same
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <numeric>

#include "recipes/recipe.h"
#include "recipes/small_mixture.h"

namespace {

using namespace small_mixture;  // kRows, Model, choose, train, ...
using Counts = std::vector<std::int64_t>;

std::int64_t sum(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }
Counts numbers(const at::Tensor& tensor) {
  const at::Tensor here = tensor.cpu();
  return {here.const_data_ptr<std::int64_t>(), here.const_data_ptr<std::int64_t>() + here.numel()};
}

/// Results of sorted rows: `counts` of them for each expert.
at::Tensor run_experts(const std::vector<at::Tensor>& experts, const at::Tensor& rows, const Counts& counts) {
  std::vector<at::Tensor> results;
  std::int64_t first = 0;
  for (std::size_t e = 0; e < experts.size(); first += counts[e++]) {
    results.push_back(at::gelu(at::mm(rows.narrow(0, first, counts[e]), experts[e])));
  }
  return at::cat(results);
}

/// Rows to their ranks: `sent` of them to each, `received` from each.
at::Tensor exchange(phalanx::Communicator& world, const at::Tensor& rows, Counts sent, Counts received) {
  const at::Tensor result = at::empty({sum(received), kDim}, rows.options());
  for (Counts* const counts : {&sent, &received}) {
    for (std::int64_t& count : *counts) count *= kDim;  // elements
  }
  world.all_to_all_uneven(result, rows.contiguous(), received, sent);
  return result;
}

at::Tensor leaf(const at::Tensor& values) { return values.detach().requires_grad_(); }

/// One pass of this rank's rows. Sets gradients and returns this rank's addend of the loss.
at::Tensor forward_backward(const Model& model, const at::Tensor& x, phalanx::Communicator& world, std::string& told) {
  const std::int64_t ranks = world.size(), mine = kExperts / ranks;
  const at::Tensor h = at::mm(x, model.weight);
  const auto [probability, expert] = choose(h, model.router);
  const at::Tensor by_expert = at::argsort(expert, /*stable=*/true);
  const at::Tensor rows = h.index_select(0, by_expert);  // sorted by expert, and so by rank
  // [rank, expert of that rank]: how many rows go there; how many rows of that rank come here
  const at::Tensor to = at::bincount(expert, {}, kExperts).view({ranks, mine}), from = at::empty_like(to);
  world.all_to_all(from, to);
  const Counts sent = numbers(to.sum(1)), received = numbers(from.sum(1)), of_expert = numbers(from.sum(0));
  // Dispatch. What arrives is sorted by rank: a stable sort puts the rows of each expert together.
  const at::Tensor arrived = leaf(exchange(world, rows.detach(), sent, received));
  const at::Tensor experts = at::arange(mine, to.options()).repeat({ranks}).repeat_interleave(from.flatten());
  const at::Tensor order = at::argsort(experts, /*stable=*/true);
  const at::Tensor made =
      run_experts(model.experts, arrived.index_select(0, order), of_expert).index_select(0, at::argsort(order));
  // Combine.
  const at::Tensor back = leaf(exchange(world, made.detach(), received, sent));
  const at::Tensor y = back.index_select(0, at::argsort(by_expert)) * probability.unsqueeze(1);
  const at::Tensor loss = loss_of(y, x);
  // Backward: the same messages in reverse. The router's gradient comes with the first call.
  loss.backward({}, /*retain_graph=*/true);
  made.backward(exchange(world, back.grad(), sent, received));
  rows.backward(exchange(world, arrived.grad(), received, sent));
  for (const at::Tensor& shared : {model.weight, model.router}) world.all_reduce(shared.mutable_grad());
  told = fmt::format("rows to each rank: {}; rows for each of its experts: {}", fmt::join(sent, " "),
                     fmt::join(of_expert, " "));
  return loss.detach();
}

bool compare(const phalanx::ProcessContext& context, bool per_rank) {
  auto& world = *context.world;
  const std::int64_t share = recipe::share_of(kRows, world.size());
  const std::int64_t mine = recipe::share_of(kExperts, world.size(), "experts");
  const Model model(world.rank() * mine, mine, context.device);
  const at::Tensor x = values("x", {kRows, kDim}, 1, context.device).narrow(0, world.rank() * share, share);
  const auto divided = train(model, [&](int step) {
    std::string told;
    const at::Tensor loss = forward_backward(model, x, world, told);
    if (per_rank && step == 0) recipe::print_by_rank(world, told);
    world.all_reduce(loss);
    return loss.item<double>();
  });
  if (context.rank != 0) return true;
  return recipe::print_beside_one_rank(world.size(), {{"divided", divided}, {"one rank", one_rank(context.device)}});
}

}  // namespace

int main(int argc, char** argv) {
  recipe::Program program;
  const bool& per_rank = program.add_per_rank_flag();
  return program.run(argc, argv, [&](const auto& context) { return compare(context, per_rank); });
}
