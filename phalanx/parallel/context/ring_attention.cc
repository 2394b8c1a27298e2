#include "phalanx/parallel/context/ring_attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "phalanx/kernels/attention_sinks.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/partial_attention.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/parallel/context/ring_schedule.h"

namespace phalanx {
namespace {

using kernels::AttentionGradients;
using kernels::AttentionKernel;
using kernels::AttentionPart;
using kernels::AttentionQueries;
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;
using Way = RingSchedule::Way;
using Documents = std::shared_ptr<const DocumentBoundaries>;

constexpr auto kWays = RingSchedule::kWays;
/// One for each way.
template <class T>
using Both = std::array<T, 2>;

/// What one call of attention needs in either pass.
struct Ring : torch::CustomClassHolder {
  Ring(std::shared_ptr<Communicator> group, const ContextCut& cut, std::int64_t local, std::int64_t window,
       Documents documents, MergeParts merge)
      : group(std::move(group)),
        seq(local * cut.ranks),
        rank(cut.rank),
        window(window),
        documents(std::move(documents)),
        merge(std::move(merge)),
        schedule(cut, seq, window, this->documents.get()) {}

  /// A rank's queries and the keys of a piece, of which some are seen.
  AttentionQueries queries_of(Way way, std::int64_t owner) const {
    return {.ranges = schedule.queries(way, owner, rank),
            .seq = seq,
            .documents = documents,
            .window = window,
            .keys = schedule.keys(way, owner)};
  }
  /// The rows of x [batch, heads, local, ...] that these queries are.
  at::Tensor rows_of(const AttentionQueries& queries, const at::Tensor& x) const {
    const bool has_head = queries.ranges[0] == schedule.keys(RingSchedule::up, rank);
    return x.narrow(2, has_head ? 0 : x.size(2) / 2, queries.count());
  }
  /// This rank's piece of x [batch, heads, local, ...].
  static at::Tensor piece_of(const at::Tensor& x, Way way) {
    const std::int64_t length = x.size(2) / 2;
    return x.narrow(2, way == RingSchedule::up ? 0 : length, length);
  }

  std::shared_ptr<Communicator> group;
  std::int64_t seq, rank, window;
  Documents documents;
  MergeParts merge;
  RingSchedule schedule;
};
using RingPtr = c10::intrusive_ptr<Ring>;

/// A piece as it travels: [2, batch, positions, kv_heads, head_dim], keys and values or their gradients.
struct Message {
  at::Tensor data;
  static Message empty(const at::Tensor& piece, at::ScalarType type) {
    return {at::empty({2, piece.size(0), piece.size(2), piece.size(1), piece.size(3)}, piece.options().dtype(type))};
  }
  at::Tensor keys() const { return data[0].transpose(1, 2); }
  at::Tensor values() const { return data[1].transpose(1, 2); }
};

/// Starts the transfers of one hop. Between two ranks messages match by their order.
class Transfers {
 public:
  explicit Transfers(Communicator& group) : group_(group) {}
  void send(const Message& message, std::int64_t rank) { add(message, rank, true); }
  void receive(const Message& message, std::int64_t rank) { add(message, rank, false); }
  Work start() { return group_.batch_isend_irecv(std::move(operations_), {.async = true}); }

 private:
  void add(const Message& message, std::int64_t rank, bool is_send) {
    operations_.push_back({.is_send = is_send, .tensor = message.data, .peer = static_cast<int>(rank)});
  }
  Communicator& group_;
  std::vector<Communicator::P2POp> operations_;
};

/// Keys and values on their way, in two buffers for each way.
class TravellingKeys {
 public:
  TravellingKeys(const Ring& ring, const at::Tensor& k, const at::Tensor& v) : ring_(ring), k_(k), v_(v) {
    for (const Way way : kWays) {
      if (ring.schedule.last_hop(way, ring.rank) == 0) continue;
      Message& own = buffer(way, 0);
      own.keys().copy_(Ring::piece_of(k, way));
      own.values().copy_(Ring::piece_of(v, way));
    }
  }
  void move(std::int64_t hop, Transfers& transfers) {
    const RingSchedule& schedule = ring_.schedule;
    for (const Way way : kWays) {
      const auto owner = schedule.owner_at(way, ring_.rank, hop);
      if (owner && hop < schedule.last_hop(way, *owner)) {
        transfers.send(buffer(way, hop), schedule.next(way, ring_.rank));
      }
      if (schedule.owner_at(way, ring_.rank, hop + 1)) {
        transfers.receive(buffer(way, hop + 1), schedule.previous(way, ring_.rank));
      }
    }
  }
  /// Of the piece that is here at this hop.
  at::Tensor keys(Way way, std::int64_t hop) { return hop == 0 ? Ring::piece_of(k_, way) : buffer(way, hop).keys(); }
  at::Tensor values(Way way, std::int64_t hop) {
    return hop == 0 ? Ring::piece_of(v_, way) : buffer(way, hop).values();
  }

 private:
  Message& buffer(Way way, std::int64_t hop) {
    Message& one = buffers_[way][static_cast<std::size_t>(hop % 2)];
    if (!one.data.defined()) one = Message::empty(Ring::piece_of(k_, way), k_.scalar_type());
    return one;
  }

  const Ring& ring_;
  const at::Tensor &k_, &v_;
  Both<Both<Message>> buffers_;
};

/// The gradients of keys and values, one hop behind them.
class TravellingGradients {
 public:
  TravellingGradients(const Ring& ring, const at::Tensor& k, at::ScalarType type) : ring_(ring), k_(k), type_(type) {
    own = {.dq = {}, .dk = kernels::empty_heads_like(k, type), .dv = kernels::empty_heads_like(k, type)};
  }
  /// At hop h go the sums of hop h - 1, on to the next rank or home.
  void move(std::int64_t hop, Transfers& transfers) {
    if (hop < 2) return;
    const RingSchedule& schedule = ring_.schedule;
    for (const Way way : kWays) {
      if (const auto owner = schedule.owner_at(way, ring_.rank, hop - 1)) {
        const bool goes_on = hop <= schedule.last_hop(way, *owner);
        transfers.send(sum(way, hop - 1), goes_on ? schedule.next(way, ring_.rank) : *owner);
      }
      if (schedule.owner_at(way, ring_.rank, hop)) {
        transfers.receive(received(way), schedule.previous(way, ring_.rank));
      }
      if (comes_home(way, hop)) {
        transfers.receive(received(way, 1), schedule.rank_at(way, ring_.rank, hop - 1));
      }
    }
  }
  /// Where this rank's addend for the piece that is here goes.
  AttentionGradients addend(Way way, std::int64_t hop) {
    if (hop == 0) return {.dq = {}, .dk = Ring::piece_of(own.dk, way), .dv = Ring::piece_of(own.dv, way)};
    return {.dq = {}, .dk = sum(way, hop).keys(), .dv = sum(way, hop).values()};
  }
  /// After the transfers of this hop, and the addends.
  void add_received(std::int64_t hop) {
    for (const Way way : kWays) {
      if (hop > 1 && ring_.schedule.owner_at(way, ring_.rank, hop)) sum(way, hop).data.add_(received(way).data);
      if (!comes_home(way, hop)) continue;
      Ring::piece_of(own.dk, way).add_(received(way, 1).keys());
      Ring::piece_of(own.dv, way).add_(received(way, 1).values());
    }
  }

  AttentionGradients own;  // of this rank's pieces

 private:
  bool comes_home(Way way, std::int64_t hop) const {
    const std::int64_t last = ring_.schedule.last_hop(way, ring_.rank);
    return last > 0 && hop == last + 1;
  }
  Message& made(Message& one, Way way) {
    if (!one.data.defined()) one = Message::empty(Ring::piece_of(k_, way), type_);
    return one;
  }
  Message& sum(Way way, std::int64_t hop) { return made(sums_[way][static_cast<std::size_t>(hop % 2)], way); }
  Message& received(Way way, std::size_t is_home = 0) { return made(received_[way][is_home], way); }

  const Ring& ring_;
  const at::Tensor& k_;
  at::ScalarType type_;
  Both<Both<Message>> sums_, received_;
};

/// The output in the type of sums, and the log-sum-exps.
AttentionPart attend_round(const Ring& ring, AttentionKernel kernel, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v) {
  const at::ScalarType type = kernels::sum_type(q.scalar_type());
  AttentionPart whole{.y = kernels::empty_heads_like(q, type).zero_(),
                      .log_sums = at::full({q.size(0), q.size(1), q.size(2)}, -std::numeric_limits<double>::infinity(),
                                           q.options().dtype(type))};
  TravellingKeys keys(ring, k, v);
  for (std::int64_t hop = 0; hop <= ring.schedule.hops(); ++hop) {
    Transfers transfers(*ring.group);
    keys.move(hop, transfers);
    const Work moved = transfers.start();
    for (const Way way : kWays) {
      const auto owner = ring.schedule.owner_at(way, ring.rank, hop);
      if (!owner) continue;
      const AttentionQueries queries = ring.queries_of(way, *owner);
      if (queries.ranges.empty()) continue;  // it only passes
      const AttentionPart part =
          attend(kernel, ring.rows_of(queries, q), keys.keys(way, hop), keys.values(way, hop), queries);
      const AttentionPart sum{ring.rows_of(queries, whole.y), ring.rows_of(queries, whole.log_sums)};
      if (hop == 0 && way == RingSchedule::up) {  // nothing is there yet
        sum.y.copy_(part.y);
        sum.log_sums.copy_(part.log_sums);
      } else {
        ring.merge(sum, part);
      }
    }
    moved.wait();
  }
  return whole;
}

AttentionGradients gradients_round(const Ring& ring, AttentionKernel kernel, const at::Tensor& dy, const at::Tensor& q,
                                   const at::Tensor& k, const at::Tensor& v, const AttentionPart& whole) {
  const at::ScalarType type = kernels::sum_type(q.scalar_type());
  const at::Tensor dq = kernels::empty_heads_like(q, type).zero_();
  TravellingKeys keys(ring, k, v);
  TravellingGradients grads(ring, k, type);
  const std::int64_t last = ring.schedule.hops();
  for (std::int64_t hop = 0; hop <= (last > 0 ? last + 1 : 0); ++hop) {
    Transfers transfers(*ring.group);
    keys.move(hop, transfers);
    grads.move(hop, transfers);
    const Work moved = transfers.start();
    for (const Way way : kWays) {
      const auto owner = ring.schedule.owner_at(way, ring.rank, hop);
      if (!owner) continue;
      AttentionGradients into = grads.addend(way, hop);
      const AttentionQueries queries = ring.queries_of(way, *owner);
      if (queries.ranges.empty()) {
        into.dk.zero_();
        into.dv.zero_();
        continue;
      }
      const auto of = [&](const at::Tensor& x) { return ring.rows_of(queries, x); };
      into.dq = of(dq);
      attention_gradients(kernel, of(dy), of(q), keys.keys(way, hop), keys.values(way, hop),
                          {.y = of(whole.y), .log_sums = of(whole.log_sums)}, queries, into);
    }
    moved.wait();
    grads.add_received(hop);
  }
  return {.dq = dq, .dk = grads.own.dk, .dv = grads.own.dv};
}

struct AttendRound : torch::autograd::Function<AttendRound> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>& given_sinks, const RingPtr& ring) {
    const at::Tensor sinks = given_sinks.value_or(at::Tensor());
    const AttentionKernel kernel = kernels::attention_kernel_for(q, k, v);
    const auto compute = [&]() -> std::vector<at::Tensor> {
      const AttentionPart whole = kernels::with_sinks(attend_round(*ring, kernel, q, k, v), sinks);
      return {whole.y.to(q.scalar_type()), whole.log_sums};
    };
    // Where the policy saves attention, a recomputed layer takes the saved result and nothing travels. All
    // ranks have one policy, so all do the same.
    const auto outputs = kernels::computed_once(kernels::SavedOp::attention, compute);
    ctx->save_for_backward({q, k, v, outputs[1], sinks});
    ctx->saved_data["y"] = outputs[0].detach();  // values for the backward pass, outside the graph
    ctx->saved_data["ring"] = c10::IValue::make_capsule(ring);
    ctx->saved_data["kernel"] = static_cast<std::int64_t>(kernel);
    return outputs[0];
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const auto ring = c10::static_intrusive_pointer_cast<Ring>(ctx->saved_data["ring"].toCapsule());
    const AttentionPart whole{.y = ctx->saved_data["y"].toTensor(), .log_sums = saved[3]};
    const AttentionGradients g = gradients_round(*ring, static_cast<AttentionKernel>(ctx->saved_data["kernel"].toInt()),
                                                 grads[0], q, k, v, whole);
    return {g.dq.to(q.scalar_type()), g.dk.to(k.scalar_type()), g.dv.to(v.scalar_type()),
            kernels::sink_gradients(grads[0], whole, saved[4]), at::Tensor()};
  }
};

class RingAttention final : public nn::ContextAttention {
 public:
  RingAttention(std::shared_ptr<Communicator> group, const ContextCut& cut, MergeParts merge)
      : group_(std::move(group)), cut_(cut), merge_(std::move(merge)) {}
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const nn::AttendOptions& options) const override {
    kernels::require_sinks_of("ring attention", q, options.sinks);
    auto ring = c10::make_intrusive<Ring>(group_, cut_, q.size(2), options.window, options.documents, merge_);
    return AttendRound::apply(kernels::in_autocast_type(q), kernels::in_autocast_type(k), kernels::in_autocast_type(v),
                              kernels::if_defined(options.sinks), std::move(ring));
  }

 private:
  std::shared_ptr<Communicator> group_;
  ContextCut cut_;
  MergeParts merge_;
};

}  // namespace

std::shared_ptr<const nn::ContextAttention> make_ring_attention(std::shared_ptr<Communicator> group,
                                                                const ContextCut& cut, MergeParts merge) {
  return std::make_shared<RingAttention>(std::move(group), cut, std::move(merge));
}

}  // namespace phalanx
