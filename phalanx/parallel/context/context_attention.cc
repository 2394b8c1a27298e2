#include "phalanx/parallel/context/context_attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <mutex>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/kernels/attention_sinks.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/causal_attention.h"
#include "phalanx/parallel/context/packed_positions.h"
#include "phalanx/parallel/context/ring_attention.h"
#include "phalanx/parallel/tensor/functional_collectives.h"

namespace phalanx {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct Ranks : torch::CustomClassHolder {
  Ranks(std::shared_ptr<Communicator> group, const ContextCut& cut,
        std::shared_ptr<const PackedPositions> packed = nullptr)
      : group(std::move(group)), cut(cut), packed(std::move(packed)) {}
  std::shared_ptr<Communicator> group;
  ContextCut cut;
  std::shared_ptr<const PackedPositions> packed;  // null: heads and tails
};
using RanksPtr = c10::intrusive_ptr<Ranks>;

void save_ranks(AutogradContext& ctx, const RanksPtr& ranks) {
  ctx.saved_data["ranks"] = c10::IValue::make_capsule(ranks);
}
RanksPtr saved_ranks(AutogradContext& ctx) {
  return c10::static_intrusive_pointer_cast<Ranks>(ctx.saved_data["ranks"].toCapsule());
}

/// Calls use(rank, its first position of this piece, positions, the first of them in the whole sequence). `local`: the
/// positions of one rank.
template <class Use>
void for_each_piece(const ContextCut& cut, std::int64_t local, const Use& use) {
  for (std::int64_t rank = 0; rank < cut.ranks; ++rank) {
    std::int64_t at = 0;
    for (const auto& [first, count] : cut.ranges_of(rank, local * cut.ranks)) {
      use(rank, at, count, first);
      at += count;
    }
  }
}

/// parts [ranks, ..., local, heads, head_dim] in the order of the sequence: [..., seq, heads, head_dim].
at::Tensor in_sequence(const at::Tensor& parts, const ContextCut& cut) {
  const std::int64_t local = parts.size(-3);
  std::vector<std::int64_t> sizes = parts.sizes().slice(1).vec();
  sizes[sizes.size() - 3] = local * cut.ranks;
  at::Tensor whole = at::empty(sizes, parts.options());
  for_each_piece(cut, local, [&](std::int64_t rank, std::int64_t at, std::int64_t count, std::int64_t first) {
    whole.narrow(-3, first, count).copy_(parts[rank].narrow(-3, at, count));
  });
  return whole;
}

/// The other way round, into `parts`.
void to_parts(const at::Tensor& whole, const ContextCut& cut, const at::Tensor& parts) {
  for_each_piece(cut, parts.size(-3), [&](std::int64_t rank, std::int64_t at, std::int64_t count, std::int64_t first) {
    parts[rank].narrow(-3, at, count).copy_(whole.narrow(-3, first, count));
  });
}

/// Keys and values [batch, kv_heads, local, head_dim] of all ranks, in the order of the sequence, in one all-gather.
struct GatherKeys : torch::autograd::Function<GatherKeys> {
  static tensor_list forward(AutogradContext* ctx, const at::Tensor& k, const at::Tensor& v, const RanksPtr& ranks) {
    save_ranks(*ctx, ranks);
    const std::int64_t batch = k.size(0), heads = k.size(1), local = k.size(2), dim = k.size(3);
    const at::Tensor mine = at::empty({2, batch, local, heads, dim}, k.options());
    mine[0].copy_(k.transpose(1, 2));
    mine[1].copy_(v.transpose(1, 2));
    const at::Tensor parts = at::empty({ranks->cut.ranks, 2, batch, local, heads, dim}, k.options());
    ranks->group->all_gather(parts, mine);
    const at::Tensor whole = ranks->packed ? ranks->packed->in_sequence(parts) : in_sequence(parts, ranks->cut);
    return {whole[0].transpose(1, 2), whole[1].transpose(1, 2)};
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const RanksPtr ranks = saved_ranks(*ctx);
    const at::Tensor& some = grads[0].defined() ? grads[0] : grads[1];
    const std::int64_t batch = some.size(0), heads = some.size(1), dim = some.size(3);
    const std::int64_t local = some.size(2) / ranks->cut.ranks;
    // Each rank's queries have made an addend for all positions.
    const auto wide = some.options().dtype(some.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    const at::Tensor parts = at::empty({ranks->cut.ranks, 2, batch, local, heads, dim}, wide);
    for (std::int64_t i = 0; i < 2; ++i) {
      const at::Tensor& given = grads[static_cast<std::size_t>(i)];
      const at::Tensor grad = (given.defined() ? given : at::zeros_like(some)).transpose(1, 2);
      ranks->packed ? ranks->packed->to_parts(grad, i, parts) : to_parts(grad, ranks->cut, parts.select(1, i));
    }
    const at::Tensor sum = at::empty({2, batch, local, heads, dim}, wide);
    ranks->group->reduce_scatter(sum, parts);
    const auto own = [&](std::int64_t i) { return sum[i].transpose(1, 2).to(some.scalar_type()); };
    return {own(0), own(1), at::Tensor()};
  }
};

/// in_sequence() or, if not kToSequence, to_parts(); and in the backward pass the other one.
template <bool kToSequence>
struct Reorder : torch::autograd::Function<Reorder<kToSequence>> {
  static at::Tensor reordered(const at::Tensor& x, const ContextCut& cut, bool to_sequence) {
    if (to_sequence) return in_sequence(x, cut);
    std::vector<std::int64_t> sizes = x.sizes().vec();
    sizes[sizes.size() - 3] /= cut.ranks;
    sizes.insert(sizes.begin(), cut.ranks);
    at::Tensor parts = at::empty(sizes, x.options());
    to_parts(x, cut, parts);
    return parts;
  }
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const RanksPtr& ranks) {
    save_ranks(*ctx, ranks);
    return reordered(x, ranks->cut, kToSequence);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    return {reordered(grads[0], saved_ranks(*ctx)->cut, !kToSequence), at::Tensor()};
  }
};

/// Part j of rank i's x [ranks, ...] becomes part i of rank j's.
at::Tensor exchanged(const at::Tensor& x, const Ranks& ranks) {
  const std::vector<std::int64_t> one_each(static_cast<std::size_t>(ranks.cut.ranks), 1);
  return all_to_all_rows(x, one_each, one_each, ranks.group);
}

/// [batch, heads, local, head_dim] of all heads -> [batch, heads / ranks, seq, head_dim] of this rank's heads.
at::Tensor heads_of_all_positions(const at::Tensor& x, const RanksPtr& ranks) {
  const std::int64_t count = ranks->cut.ranks;
  const at::Tensor sent = x.unflatten(1, {count, x.size(1) / count}).permute({1, 0, 3, 2, 4});
  return Reorder<true>::apply(exchanged(sent, *ranks), ranks).transpose(1, 2);  // of [ranks, batch, local, heads, d]
}

/// The other way round.
at::Tensor positions_of_all_heads(const at::Tensor& x, const RanksPtr& ranks) {
  const at::Tensor parts = exchanged(Reorder<false>::apply(x.transpose(1, 2), ranks), *ranks);
  // [ranks, batch, local, heads, d] -> [batch, local, ranks * heads, d], the memory layout of the projections.
  return parts.permute({1, 2, 0, 3, 4}).flatten(2, 3).transpose(1, 2);
}

class GatheredKeys final : public nn::ContextAttention {
 public:
  explicit GatheredKeys(RanksPtr ranks) : ranks_(std::move(ranks)) {}
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const nn::AttendOptions& options) const override {
    const auto packed = packed_positions(options.documents);
    const RanksPtr ranks = packed ? c10::make_intrusive<Ranks>(ranks_->group, ranks_->cut, packed) : ranks_;
    const auto all = GatherKeys::apply(kernels::in_autocast_type(k), kernels::in_autocast_type(v), ranks);
    if (packed) {
      return kernels::causal_attention_of_rows(q, all[0], all[1], packed->ranges(), options.window, options.documents,
                                               options.sinks);
    }
    const auto ranges = ranks_->cut.ranges(q.size(2) * ranks_->cut.ranks);
    return kernels::causal_attention_of_positions(q, all[0], all[1], {ranges.begin(), ranges.end()}, options.window,
                                                  options.documents, options.sinks);
  }

 private:
  /// Null where rows are cut into heads and tails.
  /// All layers of a pass have the same documents, one pass after another.
  std::shared_ptr<const PackedPositions> packed_positions(
      const std::shared_ptr<const DocumentBoundaries>& documents) const {
    if (!ranks_->cut.by_work || documents == nullptr) return nullptr;
    const std::lock_guard lock(mutex_);  // layers are computed again on threads of autograd
    if (documents_of_last_.lock() != documents) {
      last_ = std::make_shared<const PackedPositions>(ranks_->cut, *documents);
      documents_of_last_ = documents;
    }
    return last_;
  }

  RanksPtr ranks_;
  mutable std::mutex mutex_;
  mutable std::weak_ptr<const DocumentBoundaries> documents_of_last_;
  mutable std::shared_ptr<const PackedPositions> last_;
};

class ExchangedHeads final : public nn::ContextAttention {
 public:
  explicit ExchangedHeads(RanksPtr ranks) : ranks_(std::move(ranks)) {}
  at::Tensor attend(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                    const nn::AttendOptions& options) const override {
    const std::int64_t ranks = ranks_->cut.ranks, heads = q_in.size(1), kv_heads = k_in.size(1);
    if (!deals_out_heads(heads, kv_heads, ranks)) {
      throw Error(fmt::format(
          "context parallel: {} heads and {} key heads cannot be dealt out to {} ranks; expected a multiple "
          "of the ranks, or of key heads a divisor",
          heads, kv_heads, ranks));
    }
    kernels::require_sinks_of("context parallel", q_in, options.sinks);
    const std::int64_t copies = kv_heads < ranks ? ranks / kv_heads : 1;
    // [batch, heads, local, d] -> [batch, ranks, heads / ranks, local, d]
    const auto by_rank = [&](const at::Tensor& x_in, std::int64_t times) {
      const at::Tensor x = kernels::in_autocast_type(x_in);
      const at::Tensor all = times > 1 ? x.repeat_interleave(times, 1) : x;
      return all.unflatten(1, {ranks, all.size(1) / ranks});
    };
    const std::int64_t mine = heads / ranks, of_keys = kv_heads * copies / ranks;
    const at::Tensor sent = at::cat({by_rank(q_in, 1), by_rank(k_in, copies), by_rank(v_in, copies)}, 2).flatten(1, 2);
    const at::Tensor all = heads_of_all_positions(sent, ranks_);
    const at::Tensor sinks =
        options.sinks.defined() ? options.sinks.narrow(0, ranks_->cut.rank * mine, mine) : options.sinks;
    const at::Tensor y =
        kernels::causal_attention(all.narrow(1, 0, mine), all.narrow(1, mine, of_keys),
                                  all.narrow(1, mine + of_keys, of_keys), options.window, options.documents, sinks);
    return positions_of_all_heads(y, ranks_);
  }

 private:
  RanksPtr ranks_;
};

}  // namespace

std::shared_ptr<const nn::ContextAttention> make_context_attention(ContextExchange exchange,
                                                                   std::shared_ptr<Communicator> group,
                                                                   const ContextCut& cut) {
  if (cut.ranks != group->size() || cut.rank != group->rank()) {
    throw Error(fmt::format("context parallel: a cut for rank {} of {}, in a group of {} whose rank this is {}",
                            cut.rank, cut.ranks, group->size(), group->rank()));
  }
  if (cut.by_work && exchange != ContextExchange::keys) {
    throw Error(fmt::format(
        "context parallel: rows that are cut by work, and an exchange of {}; expected ContextExchange::keys, "
        "or a cut into heads and tails",
        exchange == ContextExchange::ring ? "pieces round a ring" : "heads"));
  }
  if (exchange == ContextExchange::ring) return make_ring_attention(std::move(group), cut);
  auto ranks = c10::make_intrusive<Ranks>(std::move(group), cut);
  if (exchange == ContextExchange::heads) return std::make_shared<ExchangedHeads>(std::move(ranks));
  return std::make_shared<GatheredKeys>(std::move(ranks));
}

}  // namespace phalanx
