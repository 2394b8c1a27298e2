// Ring attention written out, forward and backward: each rank has some positions of every sequence, and keys and values
// go from rank to rank until each query has seen those before it.
//
// Forward, at each step a rank starts to send the keys and values that it has to the next rank, and meanwhile attends
// to them. Outputs are merged by the log-sum-exps of their scores: with z = log(e^a + e^b), y = e^(a-z) y_a +
// e^(b-z) y_b. Backward, the keys and values go round again, and their gradients with them: each rank adds its addend,
// and after as many steps as ranks they are home. Probabilities are computed again from the merged log-sum-exps.
// --per-rank shows how many pairs of a query and a key there are at each step. Worlds of 1, 2 and 4:
// ring_attention_by_hand --spawn 1,2,4.
//
//   $ phalanx launch --nproc-per-node 2 -- ring_attention_by_hand --per-rank
//   rank 0: keys of rank 0: 8256 of 16384 pairs, keys of rank 1: 8192 of 16384 pairs
//   rank 1: keys of rank 1: 8256 of 16384 pairs, keys of rank 0: 8192 of 16384 pairs
//   step 1: ring 1.0548582, one rank 1.0548582
//   step 2: ring 0.9632716, one rank 0.9632716
//   step 3: ring 0.9047915, one rank 0.9047915
//   step 4: ring 0.8470327, one rank 0.8470327
//   step 5: ring 0.7870094, one rank 0.7870093
//   2 rank(s): losses differ from one rank's by 7.6e-08: the same
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <limits>

#include "recipes/losses.h"
#include "recipes/recipe.h"
#include "recipes/small_attention.h"

namespace {

using namespace small_attention;  // kRows, Model, heads_of, ...
using Tensors = std::vector<at::Tensor>;
constexpr double kNothing = -std::numeric_limits<double>::infinity();

/// The ranks in a circle. Queries, keys and values are [rows, heads, positions, head_dim] of a rank's positions.
struct Ring {
  phalanx::Communicator& world;
  at::Device device;

  at::Tensor positions(std::int64_t rank) const { return positions_of(rank, world.size(), device); }
  std::int64_t source(int step) const { return (world.rank() - step + world.size()) % world.size(); }
  /// Which keys of that step each query sees: bool [queries, keys].
  at::Tensor seen(int step) const {
    return positions(world.rank()).unsqueeze(1) >= positions(source(step)).unsqueeze(0);
  }
  at::Tensor scores(const at::Tensor& q, const at::Tensor& k, int step) const {
    const double scale = 1 / std::sqrt(static_cast<double>(kHeadDim));
    return (at::matmul(q, k.transpose(2, 3)) * scale).masked_fill(~seen(step), kNothing);
  }
  /// Starts to send to the next rank what comes from the one before into `arriving`.
  phalanx::Work pass_on(const at::Tensor& message, const at::Tensor& arriving) const {
    const int next = (world.rank() + 1) % world.size(), before = (world.rank() + world.size() - 1) % world.size();
    if (world.size() == 1) return arriving.copy_(message), phalanx::Work();
    return world.batch_isend_irecv(
        {{.is_send = true, .tensor = message, .peer = next}, {.is_send = false, .tensor = arriving, .peer = before}},
        {.async = true});
  }
};

/// The output and the log-sum-exps.
std::pair<at::Tensor, at::Tensor> forward(const Ring& ring, const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v) {
  at::Tensor y, log_sums, here = at::stack({k, v}), arriving = at::empty_like(here);
  for (int step = 0; step < ring.world.size(); ++step, std::swap(here, arriving)) {
    const phalanx::Work moved = ring.pass_on(here, arriving);
    const at::Tensor scores = ring.scores(q, here[0], step), sums = at::logsumexp(scores, {-1});
    // Where a query sees no key of this step, the sum of exponentials is 0, and so is its share.
    const at::Tensor part = at::matmul((scores - sums.clamp_min(-1e30).unsqueeze(3)).exp(), here[1]);
    const at::Tensor merged = step == 0 ? sums : at::logaddexp(log_sums, sums);
    const at::Tensor share = (sums - merged).exp().unsqueeze(3);
    y = step == 0 ? part : y * (log_sums - merged).exp().unsqueeze(3) + part * share;
    log_sums = merged;
    moved.wait();
  }
  return {y, log_sums};
}

/// The gradients of q, k and v.
Tensors backward(const Ring& ring, const at::Tensor& dy, const Tensors& qkv, const at::Tensor& y,
                 const at::Tensor& log_sums) {
  const at::Tensor &q = qkv[0], dot = (dy * y).sum(3, /*keepdim=*/true), dq = at::zeros_like(q);
  const double scale = 1 / std::sqrt(static_cast<double>(kHeadDim));
  at::Tensor here = at::stack({qkv[1], qkv[2], at::zeros_like(q), at::zeros_like(q)}), arriving = at::empty_like(here);
  for (int step = 0; step < ring.world.size(); ++step, std::swap(here, arriving)) {
    const at::Tensor k = here[0], v = here[1], dk = here[2], dv = here[3];
    const at::Tensor p = (ring.scores(q, k, step) - log_sums.unsqueeze(3)).exp();
    const at::Tensor dscores = p * (at::matmul(dy, v.transpose(2, 3)) - dot) * scale;
    dq.add_(at::matmul(dscores, k));
    dk.add_(at::matmul(dscores.transpose(2, 3), q));
    dv.add_(at::matmul(p.transpose(2, 3), dy));
    ring.pass_on(here, arriving).wait();
  }
  return {dq, here[2], here[3]};  // each rank's own again
}

/// Autograd computes the projections, and nothing that crosses ranks.
at::Tensor forward_backward(const Model& model, const at::Tensor& x, const Ring& ring) {
  const Tensors qkv = {heads_of(x, model.wq), heads_of(x, model.wk), heads_of(x, model.wv)};
  const auto [attended, log_sums] = forward(ring, qkv[0].detach(), qkv[1].detach(), qkv[2].detach());
  const at::Tensor y = attended.detach().requires_grad_();
  const at::Tensor loss = loss_of(y, model.wo, x);
  loss.backward();
  const Tensors grads =
      backward(ring, y.grad(), {qkv[0].detach(), qkv[1].detach(), qkv[2].detach()}, attended, log_sums);
  for (std::size_t i = 0; i < qkv.size(); ++i) qkv[i].backward(grads[i]);
  return loss.detach();
}

bool compare(const phalanx::ProcessContext& context, bool per_rank) {
  const Ring ring{*context.world, context.device};
  const Model model(context.device);
  const at::Tensor x = input(context.device).index_select(1, ring.positions(context.rank));
  std::string told;
  for (int step = 0; step < ring.world.size(); ++step) {
    const at::Tensor seen = ring.seen(step);
    told += fmt::format("{}keys of rank {}: {} of {} pairs", step > 0 ? ", " : "", ring.source(step),
                        seen.sum().item<std::int64_t>(), seen.numel());
  }
  if (per_rank) recipe::print_by_rank(ring.world, told);
  const auto losses = train_together(model, ring.world, [&](int) { return forward_backward(model, x, ring); });
  if (context.rank != 0) return true;
  return recipe::print_beside_one_rank(ring.world.size(), {{"ring", losses}, {"one rank", one_rank(context.device)}});
}

}  // namespace

int main(int argc, char** argv) {
  recipe::Program program;
  const bool& per_rank = program.add_per_rank_flag();
  return program.run(argc, argv, [&](const auto& context) { return compare(context, per_rank); });
}
