#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/gloo/gloo_operation.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/signature.h"
#include "phalanx/comm/slices.h"

namespace phalanx {
namespace {

constexpr std::size_t kSmallReduction = 64 * 1024;   // bytes in all; below this, every rank gathers everything
constexpr std::size_t kSmallGather = 1024 * 1024;    // likewise; below this, parts go straight to all ranks
constexpr std::size_t kBroadcastPiece = 512 * 1024;  // bytes; a rank passes on one while it receives the next

class GlooCollective final : public GlooOperation {
 public:
  GlooCollective(GlooBackend& backend, const OperationDescription& description)
      : GlooOperation(backend),
        d_(description),
        size_(static_cast<std::size_t>(backend.size())),
        rank_(static_cast<std::size_t>(backend.rank())),
        element_(element_size(description.dtype)),
        index_(backend.begin_collective()) {}
  ~GlooCollective() override {
    if (!messages_.empty()) backend_.abort("a collective was given up before it was through");
  }

  Progress advance() override {
    if (!can_go_on()) return Progress::blocked;
    if (!have_passed()) return Progress::blocked;
    if (next()) return Progress::moved;
    if (is_given_up()) return Progress::blocked;
    backend_.collective_done();
    return Progress::done;
  }

  void check_peers() override {
    GlooOperation::check_peers();
    if (failure_) return;
    if (const std::string stuck = backend_.stall_reason(); !stuck.empty())
      throw CommError(fmt::format("the ranks do not call the same operation: {}", stuck));
  }
  std::vector<int> missing_ranks() override { return backend_.behind(index_); }

 private:
  using Pointer = std::shared_ptr<Message>;

  std::size_t bytes(std::int64_t count) const { return static_cast<std::size_t>(count) * element_; }
  std::size_t after(std::size_t ranks) const { return (rank_ + ranks) % size_; }
  std::size_t before(std::size_t ranks) const { return (rank_ + size_ - ranks) % size_; }

  // Both ends know when there is nothing to send.
  Pointer post(bool is_send, std::size_t peer, const void* data, std::size_t bytes) {
    if (bytes == 0) return nullptr;
    messages_.push_back(backend_.transport().post({.is_send = is_send,
                                                   .data = const_cast<void*>(data),
                                                   .count = static_cast<std::int64_t>(bytes),
                                                   .dtype = DataType::u8,
                                                   .peer = static_cast<int>(peer),
                                                   .tag = kCollectiveTag}));
    return messages_.back();
  }
  void send(std::size_t peer, const std::byte* data, std::size_t bytes) { post(true, peer, data, bytes); }
  Pointer receive(std::size_t peer, std::byte* data, std::size_t bytes) { return post(false, peer, data, bytes); }
  void receive_and_pass_on(std::size_t peer, std::byte* data, std::size_t bytes) {
    if (Pointer message = receive(peer, data, bytes)) relayed_.push_back(std::move(message));
  }

  // A collective fails on all ranks if one gives up before it is through: also on those that wait for others, or whose
  // data have all arrived.
  bool is_given_up() {
    const int rank = size_ > 1 ? backend_.transport().gave_up_before(index_) : -1;
    if (rank >= 0) failure_.set(fmt::format("rank {} has given up the group", rank));
    return rank >= 0;
  }

  // True once all messages of the step are done. What fails is kept in failure_.
  bool have_passed() {
    while (!failure_ && !(messages_.empty() && relayed_.empty())) {
      pass_on();
      std::erase_if(messages_, [&](const Pointer& message) { return message->is_done() && is_good(*message); });
      if (messages_.empty()) continue;
      is_given_up();
      return false;
    }
    relay_to_.clear();
    return !failure_;
  }
  // In the order of posting, which the next rank relies on.
  void pass_on() {
    for (; !relayed_.empty() && relayed_.front()->is_done() && is_good(*relayed_.front()); relayed_.pop_front())
      for (const std::size_t peer : relay_to_)
        send(peer, static_cast<std::byte*>(relayed_.front()->transfer().data), relayed_.front()->bytes());
  }
  bool is_good(const Message& message) {
    const std::string wrong = message.mismatch() + message.error();
    if (!wrong.empty()) failure_.set(wrong);
    return wrong.empty();
  }

  // Every rank sends sent(r) to every other rank r, and receives into received(r).
  struct Part {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  template <class Sent, class Received>
  void exchange(Sent sent, Received received) {
    for (std::size_t i = 1; i < size_; ++i) {
      const Part part = received(before(i));
      receive(before(i), part.data, part.bytes);
    }
    for (std::size_t i = 1; i < size_; ++i) {
      const Part part = sent(after(i));
      send(after(i), part.data, part.bytes);
    }
  }

  // All-gathers blocks of the same size in a_, in log2(ranks) rounds: in each, every rank doubles what it has.
  void gather_blocks(std::size_t bytes) {
    block_ = bytes;
    a_ = buffer(bytes * size_);
    gathered_ = 1;
  }
  std::byte* own_block() const { return a_.get(); }
  const std::byte* block(std::size_t rank) const { return a_.get() + (rank + size_ - rank_) % size_ * block_; }
  void double_blocks() {
    const std::size_t count = std::min(gathered_, size_ - gathered_);
    receive(after(gathered_), a_.get() + gathered_ * block_, count * block_);
    send(before(gathered_), a_.get(), count * block_);
    gathered_ += count;
  }

  // All-gathers parts of the output; part_of_rank(rank) gives their elements. Large ones go round in a ring, so that
  // each passes once from node to node.
  template <class PartOf>
  void gather_parts(std::byte* own, PartOf part_of_rank) {
    const std::size_t own_bytes = part_of_rank(rank_).size() * element_;
    if (bytes(d_.output_count) <= kSmallGather)
      return exchange(
          [&](std::size_t) {
            return Part{own, own_bytes};
          },
          [&](std::size_t r) { return place_of(part_of_rank(r)); });
    for (std::size_t i = 1; i < size_; ++i) {
      const Part part = place_of(part_of_rank(before(i)));
      if (i + 1 < size_)
        receive_and_pass_on(before(1), part.data, part.bytes);
      else
        receive(before(1), part.data, part.bytes);
    }
    relay_to_ = {after(1)};
    send(after(1), own, own_bytes);
  }
  // The same for the root alone.
  template <class PartOf>
  void collect_parts(const std::byte* own, PartOf part_of_rank) {
    if (backend_.rank() != d_.root)
      return send(static_cast<std::size_t>(d_.root), own, part_of_rank(rank_).size() * element_);
    for (std::size_t i = 1; i < size_; ++i) {
      const Part part = place_of(part_of_rank(before(i)));
      receive(before(i), part.data, part.bytes);
    }
  }
  Part place_of(const Range& range) const { return {output() + range.begin * element_, range.size() * element_}; }

  // Receives `bytes` of each other rank into a_, in rank order; sent(r) is what rank r gets.
  template <class Sent>
  void exchange_into_buffer(std::size_t bytes, Sent sent) {
    a_ = buffer(bytes * (size_ - 1));
    exchange(sent, [&](std::size_t r) { return Part{a_.get() + (r - (r > rank_ ? 1 : 0)) * bytes, bytes}; });
  }
  // out = the reduction of `count` elements of each rank: the others' are in a_ after exchange_into_buffer(); `own` is
  // this rank's.
  void reduce_parts(void* out, const std::byte* own, std::size_t count) const {
    if (count == 0) return;
    std::vector<const void*> inputs;
    const std::byte* next = a_.get();
    for (std::size_t r = 0; r < size_; ++r) {
      inputs.push_back(r == rank_ ? own : next);
      if (r != rank_) next += count * element_;
    }
    reduce_kernel(d_.dtype, d_.op)(out, inputs.data(), static_cast<int>(size_), count);
  }

  std::byte* output() const { return static_cast<std::byte*>(d_.output); }
  // Only read; a Transfer has one pointer for both directions.
  std::byte* input() const { return static_cast<std::byte*>(const_cast<void*>(d_.input)); }

  // Does one step. False when all is done.
  bool next() {
    if (size_ == 1) return d_.compare_only ? false : (alone(), false);
    if (gathered_ < size_) return double_blocks(), true;
    if (comparison_ != Comparison::through) return compare();
    const int step = step_++;
    switch (d_.verb) {
      case Verb::broadcast:
        return broadcast(step);
      case Verb::all_reduce:
      case Verb::reduce:
        return reduce(step);
      case Verb::all_gather:
        return gather_all(step);
      case Verb::reduce_scatter:
        return reduce_scatter(step);
      case Verb::gather:
        return gather(step);
      case Verb::scatter:
        return scatter(step);
      case Verb::all_to_all:
        return exchange_all(step);
      default:
        return false;  // barrier: all ranks have arrived
    }
  }

  // What the ranks call, before data move.
  bool compare() {
    switch (comparison_) {
      case Comparison::begins:
        comparison_ = Comparison::of_signatures;
        return exchange_signatures(), true;
      case Comparison::of_signatures:
        compare_signatures();
        if (!has_own_counts()) break;
        comparison_ = Comparison::of_counts;
        return exchange_counts(), true;
      case Comparison::of_counts:
        compare_counts();
        break;
      case Comparison::through:
        break;
    }
    comparison_ = Comparison::through;
    return !d_.compare_only && !nothing_to_move() && next();
  }

  void alone() {
    // With one rank, reductions, broadcast and barrier change nothing.
    if (d_.input != nullptr && d_.output != nullptr) gloo_copy(d_.output, d_.input, bytes(d_.output_count));
  }

  void exchange_signatures() {
    const Signature mine = signature_of(d_);
    gather_blocks(sizeof mine);
    std::memcpy(own_block(), &mine, sizeof mine);
  }

  void compare_signatures() const {
    std::vector<Signature> signatures(size_);
    for (std::size_t r = 0; r < size_; ++r) std::memcpy(&signatures[r], block(r), sizeof(Signature));
    require_equal_signatures(signatures);
  }

  // The signatures of uneven all_to_all leave the counts out, as they differ.
  // Every rank sees those of all ranks, so all see a mismatch.
  bool has_own_counts() const { return d_.verb == Verb::all_to_all && !d_.input_counts.empty(); }

  void exchange_counts() {
    const std::size_t half = size_ * sizeof(std::int64_t);
    gather_blocks(2 * half);
    std::memcpy(own_block(), d_.input_counts.data(), half);
    std::memcpy(own_block() + half, d_.output_counts.data(), half);
  }

  void compare_counts() {
    std::vector<const std::int64_t*> inputs, outputs;
    for (std::size_t r = 0; r < size_; ++r) {
      inputs.push_back(reinterpret_cast<const std::int64_t*>(block(r)));
      outputs.push_back(inputs.back() + size_);
    }
    if (const std::string text = all_to_all_mismatch(inputs, outputs); !text.empty()) throw CommError(text);
    for (const std::int64_t* counts : inputs)
      any_uneven_ = any_uneven_ || std::any_of(counts, counts + size_, [](std::int64_t count) { return count > 0; });
  }

  // Depends only on what is the same on all ranks.
  bool nothing_to_move() const {
    switch (d_.verb) {
      case Verb::barrier:
        return true;
      case Verb::all_gather:
        return d_.output_count == 0;
      case Verb::reduce_scatter:
      case Verb::gather:
        return d_.input_count == 0;
      case Verb::all_to_all:
        return d_.input_counts.empty() ? d_.input_count == 0 : !any_uneven_;
      default:
        return d_.output_count == 0;
    }
  }

  // Down a binomial tree, in pieces. Ranks are counted from the root: rank v gets its data from v less its highest bit.
  bool broadcast(int step) {
    if (step > 1) return false;
    const auto root = static_cast<std::size_t>(d_.root), v = before(root), total = bytes(d_.output_count);
    std::size_t child = 1;
    while (child <= v) child *= 2;
    for (std::size_t c = child; v + c < size_; c *= 2) relay_to_.push_back(after(c));
    for (std::size_t at = 0; at < total; at += kBroadcastPiece) {
      const std::size_t piece = std::min(kBroadcastPiece, total - at);
      if (v > 0) receive_and_pass_on(before(child / 2), output() + at, piece);
      for (const std::size_t peer : relay_to_)
        if (v == 0) send(peer, output() + at, piece);
    }
    return true;
  }

  bool reduce(int step) {
    const auto count = static_cast<std::size_t>(d_.output_count);
    const std::size_t total = count * element_;
    const bool wants_result = d_.verb == Verb::all_reduce || backend_.rank() == d_.root;
    if (total * size_ <= kSmallReduction) return reduce_small(step, wants_result);
    const auto slice = [&](std::size_t r) { return slice_of(count, backend_.size(), static_cast<int>(r)); };
    const Part mine = place_of(slice(rank_));
    if (step == 1) {
      exchange_into_buffer(mine.bytes, [&](std::size_t r) { return place_of(slice(r)); });
      return true;
    }
    if (step > 2) return false;
    // Of reduce() only the root's tensor may change.
    if (!wants_result) b_ = buffer(mine.bytes);
    std::byte* const reduced = wants_result ? mine.data : b_.get();
    reduce_parts(reduced, mine.data, slice(rank_).size());
    if (d_.verb == Verb::all_reduce)
      gather_parts(reduced, slice);
    else
      collect_parts(reduced, slice);
    return true;
  }

  bool reduce_small(int step, bool wants_result) {
    const std::size_t total = bytes(d_.output_count);
    if (step == 1) {
      gather_blocks(total);
      gloo_copy(own_block(), d_.output, total);
      return true;
    }
    if (!wants_result) return false;
    std::vector<const void*> inputs;
    for (std::size_t r = 0; r < size_; ++r) inputs.push_back(block(r));
    reduce_kernel(d_.dtype, d_.op)(d_.output, inputs.data(), static_cast<int>(size_),
                                   static_cast<std::size_t>(d_.output_count));
    return false;
  }

  bool gather_all(int step) {
    const auto part = [&](std::size_t r) { return part_of(d_.counts, d_.input_count, static_cast<int>(r)); };
    if (step > 1) return false;
    gather_parts(input(), part);
    gloo_copy(place_of(part(rank_)).data, input(), bytes(d_.input_count));
    return true;
  }

  bool reduce_scatter(int step) {
    const auto part = [&](std::size_t r) {
      const Range range = part_of(d_.counts, d_.output_count, static_cast<int>(r));
      return Part{input() + range.begin * element_, range.size() * element_};
    };
    if (step == 1) {
      exchange_into_buffer(bytes(d_.output_count), part);
      return true;
    }
    reduce_parts(d_.output, part(rank_).data, static_cast<std::size_t>(d_.output_count));
    return false;
  }

  bool gather(int step) {
    if (step > 1) return false;
    const std::size_t own = bytes(d_.input_count);
    if (backend_.rank() != d_.root) return send(static_cast<std::size_t>(d_.root), input(), own), true;
    for (std::size_t i = 1; i < size_; ++i) receive(before(i), output() + before(i) * own, own);
    gloo_copy(output() + rank_ * own, input(), own);
    return true;
  }

  bool scatter(int step) {
    if (step > 1) return false;
    const std::size_t own = bytes(d_.output_count);
    if (backend_.rank() != d_.root) return receive(static_cast<std::size_t>(d_.root), output(), own), true;
    for (std::size_t i = 1; i < size_; ++i) send(after(i), input() + after(i) * own, own);
    gloo_copy(output(), input() + rank_ * own, own);
    return true;
  }

  bool exchange_all(int step) {
    if (step > 1) return false;
    const std::int64_t even = d_.input_count / static_cast<std::int64_t>(size_);
    const auto part = [&](std::byte* data, const std::vector<std::int64_t>& counts, std::size_t r) {
      const Range range = part_of(counts, even, static_cast<int>(r));
      return Part{data + range.begin * element_, range.size() * element_};
    };
    const auto sent = [&](std::size_t r) { return part(input(), d_.input_counts, r); };
    const auto received = [&](std::size_t r) { return part(output(), d_.output_counts, r); };
    exchange(sent, received);
    gloo_copy(received(rank_).data, sent(rank_).data, sent(rank_).bytes);
    return true;
  }

  using Buffer = std::unique_ptr<std::byte[]>;
  static Buffer buffer(std::size_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(bytes); }

  const OperationDescription& d_;
  const std::size_t size_, rank_, element_;
  const std::uint64_t index_;  // number of this collective in the group
  enum class Comparison : std::uint8_t { begins, of_signatures, of_counts, through };
  Comparison comparison_ = Comparison::begins;
  int step_ = 1;  // of the verb
  bool any_uneven_ = false;
  Buffer a_, b_;
  std::size_t block_ = 0, gathered_ = size_;  // of gather_blocks(): bytes of a block, and blocks that are here
  std::vector<Pointer> messages_;             // of this step, not done
  std::deque<Pointer> relayed_;               // receives whose data go on
  std::vector<std::size_t> relay_to_;         // to these ranks
};

}  // namespace

std::unique_ptr<Operation> make_gloo_collective(GlooBackend& backend, const OperationDescription& description) {
  return std::make_unique<GlooCollective>(backend, description);
}

}  // namespace phalanx
