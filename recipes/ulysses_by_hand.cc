// Ulysses written out, forward and backward: each rank has some positions of every sequence, and for attention alone
// the ranks exchange them for all positions of some heads.
//
// Attention needs all positions, but its heads know nothing of each other. So an all-to-all gives each rank all
// positions of heads / ranks heads, every rank runs plain causal attention, and a second all-to-all brings the results
// back to the positions. Backward, the same two in reverse. --per-rank shows what a rank has before and after. Worlds
// of 1, 2 and 4: ulysses_by_hand --spawn 1,2,4.
//
//   $ phalanx launch --nproc-per-node 2 -- ulysses_by_hand --per-rank
//   rank 0: 8 heads of 128 positions -> 4 heads of 256 positions
//   rank 1: 8 heads of 128 positions -> 4 heads of 256 positions
//   step 1: heads 1.0548582, one rank 1.0548582
//   step 2: heads 0.9632716, one rank 0.9632716
//   step 3: heads 0.9047915, one rank 0.9047915
//   step 4: heads 0.8470327, one rank 0.8470327
//   step 5: heads 0.7870092, one rank 0.7870093
//   2 rank(s): losses differ from one rank's by 7.6e-08: the same
#include <ATen/TensorOperators.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>
#include <fmt/format.h>

#include "recipes/losses.h"
#include "recipes/recipe.h"
#include "recipes/small_attention.h"

namespace {

using namespace small_attention;  // kRows, Model, heads_of, ...
using Tensors = std::vector<at::Tensor>;

/// Both directions, for tensors [n, rows, heads, positions, head_dim].
struct Exchange {
  Exchange(phalanx::Communicator& world, at::Device device) : world(world) {
    Tensors all;
    for (int r = 0; r < world.size(); ++r) all.push_back(positions_of(r, world.size(), device));
    by_rank = at::cat(all);  // the positions in the order in which the ranks have them
    recipe::share_of(kHeads, world.size(), "heads");
  }
  /// All heads of this rank's positions -> this rank's heads of all positions.
  at::Tensor to_heads(const at::Tensor& x) const {
    const at::Tensor parts = moved(x.unflatten(2, {world.size(), -1}).movedim(2, 0));  // [rank, n, rows, heads, ...]
    const at::Tensor joined = parts.movedim(0, 3).flatten(3, 4);                       // of all ranks' positions
    return joined.index_select(3, at::argsort(by_rank));
  }
  /// The other way round.
  at::Tensor to_positions(const at::Tensor& x) const {
    const at::Tensor parts = moved(x.index_select(3, by_rank).unflatten(3, {world.size(), -1}).movedim(3, 0));
    return parts.movedim(0, 2).flatten(2, 3);
  }
  /// Part j of this rank's x [ranks, ...] goes to rank j.
  at::Tensor moved(const at::Tensor& x) const {
    const at::Tensor sent = x.contiguous(), received = at::empty_like(sent);
    world.all_to_all(received, sent);
    return received;
  }

  phalanx::Communicator& world;
  at::Tensor by_rank;
};

at::Tensor leaf(const at::Tensor& values) { return values.detach().requires_grad_(); }

/// Autograd computes what a rank does alone; every message is written here.
at::Tensor forward_backward(const Model& model, const at::Tensor& x, const Exchange& exchange) {
  const at::Tensor qkv = at::stack({heads_of(x, model.wq), heads_of(x, model.wk), heads_of(x, model.wv)});
  const at::Tensor mine = leaf(exchange.to_heads(qkv.detach()));  // [3, rows, heads / ranks, seq, head_dim]
  const at::Tensor attended = at::scaled_dot_product_attention(mine[0], mine[1], mine[2], /*attn_mask=*/{},
                                                               /*dropout_p=*/0.0, /*is_causal=*/true);
  const at::Tensor y = leaf(exchange.to_positions(attended.detach().unsqueeze(0))[0]);
  const at::Tensor loss = loss_of(y, model.wo, x);
  loss.backward();
  attended.backward(exchange.to_heads(y.grad().unsqueeze(0))[0]);
  qkv.backward(exchange.to_positions(mine.grad()));
  return loss.detach();
}

bool compare(const phalanx::ProcessContext& context, bool per_rank) {
  auto& world = *context.world;
  const Exchange exchange(world, context.device);
  const Model model(context.device);
  const at::Tensor x = input(context.device).index_select(1, positions_of(context.rank, world.size(), context.device));
  if (per_rank) {
    const at::Tensor q = heads_of(x, model.wq).detach().unsqueeze(0), mine = exchange.to_heads(q);
    recipe::print_by_rank(world, fmt::format("{} heads of {} positions -> {} heads of {} positions", q.size(2),
                                             q.size(3), mine.size(2), mine.size(3)));
  }
  const auto losses = train_together(model, world, [&](int) { return forward_backward(model, x, exchange); });
  if (context.rank != 0) return true;
  return recipe::print_beside_one_rank(world.size(), {{"heads", losses}, {"one rank", one_rank(context.device)}});
}

}  // namespace

int main(int argc, char** argv) {
  recipe::Program program;
  const bool& per_rank = program.add_per_rank_flag();
  return program.run(argc, argv, [&](const auto& context) { return compare(context, per_rank); });
}
