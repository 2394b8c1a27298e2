#include <algorithm>
#include <cstring>
#include <vector>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"
#include "phalanx/comm/backends/local_shm/collective_parts.h"
#include "phalanx/comm/backends/local_shm/collective_rounds.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/stream_copy.h"

namespace phalanx {
namespace {

constexpr std::size_t kOneShotBytes = 16U << 10;
// For a message larger than the caches, smaller chunks are still in the second-level cache when they are copied out.
// For a smaller message fewer waits are better. It depends on the size only: all ranks must agree.
constexpr std::size_t kLargeBytes = 8U << 20;
constexpr std::size_t kLargeChunk = 256U << 10;
constexpr std::size_t kReduceTile = 16U << 10;  // bytes; reduced, then copied to the slot while in the L1 cache

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

// The slots that one collective uses.
class Slots {
 public:
  Slots(ControlBlock& control_block, const ShmSegment& segment, std::uint64_t first_round)
      : control_block_(control_block), segment_(segment), first_round_(first_round) {}

  int rank() const { return control_block_.rank(); }
  int size() const { return control_block_.size(); }
  std::size_t bytes() const { return segment_.layout().slot_bytes; }
  std::byte* own(std::size_t round) const {
    const std::uint64_t t = first_round_ + round;
    PHALANX_ASSERT(control_block_.first_behind(t - 1) < 0, "a peer may still read what the slot holds");
    return segment_.slot(rank(), t);
  }
  const std::byte* of(int peer, std::size_t round) const {
    const std::uint64_t t = first_round_ + round;
    PHALANX_ASSERT(control_block_.reached(peer, t), "the peer has not written its slot");
    PHALANX_ASSERT(control_block_.round() < t + 2, "this rank has said that it no longer reads the slot");
    return segment_.slot(peer, t);
  }
  // Starts with the next rank, so that not all read the same one at once.
  template <class Body>
  void for_each_peer(Body body) const {
    for (int k = 1; k < size(); ++k) body((rank() + k) % size());
  }

 private:
  ControlBlock& control_block_;
  const ShmSegment& segment_;
  std::uint64_t first_round_;
};

// --- all_reduce and reduce -------------------------------------------------------------------------------------------

class SlotReduce final : public CollectiveRounds {
 public:
  SlotReduce(const OperationDescription& d, ControlBlock& control_block, const ShmSegment& segment,
             std::uint64_t first_round)
      : slots_(control_block, segment, first_round),
        tensor_(static_cast<std::byte*>(d.output)),
        elements_(static_cast<std::size_t>(d.output_count)),
        width_(element_size(d.dtype)),
        to_all_(d.verb == Verb::all_reduce),
        gets_result_(to_all_ || d.root == slots_.rank()),
        kernel_(reduce_kernel(d.dtype, d.op)),
        sources_(static_cast<std::size_t>(slots_.size())) {
    const std::size_t bytes = elements_ * width_;
    if (bytes <= kOneShotBytes || slots_.size() == 1) return;  // alone, the tensor is its own result
    const std::size_t per_slot =
        (bytes >= kLargeBytes ? std::min(slots_.bytes(), kLargeChunk) : slots_.bytes()) / width_;
    // Equal chunks: a short last one would cost as many waits as a full one.
    chunks_ = (elements_ + per_slot - 1) / per_slot;
    chunk_ = std::min(per_slot, ((elements_ + chunks_ - 1) / chunks_ + 63) / 64 * 64);
    chunks_ = (elements_ + chunk_ - 1) / chunk_;
    count_ = chunks_ + 1;
  }

  bool write(std::size_t round) override {
    if (is_one_shot()) write_whole();
    if (round >= 2) copy_results(round - 2);
    if (round >= 1) reduce_slice(round - 1);
    if (round < chunks_) write_chunk(round);
    return true;
  }

  void read(std::size_t round) override {
    if (is_one_shot()) return reduce_whole();
    if (round == chunks_) copy_results(round - 1);
  }

 private:
  bool is_one_shot() const { return chunks_ == 0; }
  // In elements: the chunk, and a rank's slice within it.
  Range chunk(std::size_t number) const {
    return {std::min(elements_, number * chunk_), std::min(elements_, (number + 1) * chunk_)};
  }
  Range slice(std::size_t number, int rank) const { return slice_of(chunk(number).size(), slots_.size(), rank); }

  void write_whole() {
    if (slots_.size() > 1 && (to_all_ || !gets_result_)) copy_bytes(slots_.own(0), tensor_, elements_ * width_);
  }
  void reduce_whole() {
    if (slots_.size() > 1 && gets_result_ && elements_ > 0) reduce(tensor_, tensor_, 0, {0, elements_});
  }

  void write_chunk(std::size_t number) {
    const std::byte* const from = tensor_ + chunk(number).begin * width_;
    std::byte* const slot = slots_.own(number);
    slots_.for_each_peer([&](int peer) {
      const Range its = slice(number, peer);
      copy_bytes(slot + its.begin * width_, from + its.begin * width_, its.size() * width_);
    });
  }

  void reduce_slice(std::size_t number) {
    const Range own = slice(number, slots_.rank());
    std::byte* const in_place = tensor_ + chunk(number).begin * width_;
    std::byte* const slot = slots_.own(number);
    std::byte* const result = gets_result_ ? in_place : slot;
    const std::size_t tile = kReduceTile / width_;
    for (std::size_t at = own.begin; at < own.end; at += tile) {
      const Range part{at, std::min(own.end, at + tile)};
      reduce(result, in_place, number, part);
      if (to_all_) std::memcpy(slot + at * width_, result + at * width_, part.size() * width_);
    }
  }

  // Reduces elements `part` of `own` and of the peers' slots, in rank order. `to` and `own` are the addresses of
  // element 0.
  void reduce(std::byte* to, const std::byte* own, std::size_t round, Range part) {
    const std::size_t at = part.begin * width_;
    for (int r = 0; r < slots_.size(); ++r)
      sources_[static_cast<std::size_t>(r)] = (r == slots_.rank() ? own : slots_.of(r, round)) + at;
    kernel_(to + at, sources_.data(), slots_.size(), part.size());
  }

  void copy_results(std::size_t number) {
    if (!gets_result_) return;
    std::byte* const to = tensor_ + chunk(number).begin * width_;
    slots_.for_each_peer([&](int peer) {
      const Range its = slice(number, peer);
      copy_bytes(to + its.begin * width_, slots_.of(peer, number) + its.begin * width_, its.size() * width_);
    });
  }

  const Slots slots_;
  std::byte* const tensor_;
  const std::size_t elements_, width_;
  const bool to_all_, gets_result_;
  const ReduceKernel kernel_;
  std::vector<const void*> sources_;
  std::size_t chunks_ = 0;  // 0: one shot
  std::size_t chunk_ = 0;   // elements
};

// --- the others ------------------------------------------------------------------------------------------------------

// A slot holds one piece for all, or one for each destination: that for rank d begins at d * piece_.
class SlotExchange final : public CollectiveRounds {
 public:
  SlotExchange(const OperationDescription& d, ControlBlock& control_block, const ShmSegment& segment,
               std::uint64_t first_round)
      : slots_(control_block, segment, first_round),
        d_(d),
        parts_(d, slots_.size()),
        writes_(parts_.is_source(slots_.rank()) && (d.verb != Verb::gather || d.root != slots_.rank())),
        reads_(parts_.is_destination(slots_.rank())),
        keeps_own_(reads_ && parts_.is_source(slots_.rank()) &&
                   (d.verb == Verb::all_to_all || d.verb == Verb::gather || d.verb == Verb::scatter)),
        one_piece_(parts_.gives_one_part()),
        streams_(static_cast<std::size_t>(d.output_count) * element_size(d.dtype) >= kStreamBytes),
        first_piece_(d.input_counts.empty() ? 0 : 1),
        piece_(one_piece_ ? slots_.bytes() : slots_.bytes() / static_cast<std::size_t>(slots_.size()) / 64 * 64) {
    set_count(parts_.longest());
    const int source = parts_.has_one_source() ? d.root : kAll;
    awaited_to_write_ = writes_ ? kAll : source;
    awaited_to_read_ = reads_ ? source : slots_.rank();
    if (d.verb == Verb::reduce_scatter) prepare_sum();
  }

  bool write(std::size_t round) override {
    if (round == 1 && first_piece_ == 1) read_counts();
    if (round < first_piece_)
      write_counts();
    else if (writes_ && one_piece_)
      write_piece(slots_.own(round), round, slots_.rank());
    else if (writes_)
      slots_.for_each_peer([&](int peer) { write_piece(slots_.own(round) + place_for(peer), round, peer); });
    return true;
  }

  // In all_gather the piece that was just written is in the cache.
  void copy_own(std::size_t round) override {
    if (d_.verb == Verb::all_gather) keep_own(round);
  }

  void read(std::size_t round) override {
    if (!reads_ || round < first_piece_) return;
    if (kernel_) return sum(round);
    slots_.for_each_peer([&](int peer) {
      if (parts_.is_source(peer)) deliver(piece_of(round, parts_.taken_from(peer)), written_by(peer, round));
    });
    if (keeps_own_) keep_own(round);
  }

 private:
  void set_count(std::size_t bytes) { count_ = first_piece_ + std::max<std::size_t>(1, (bytes + piece_ - 1) / piece_); }
  std::size_t place_for(int destination) const { return static_cast<std::size_t>(destination) * piece_; }
  const std::byte* written_by(int peer, std::size_t round) const {
    return slots_.of(peer, round) + (one_piece_ ? 0 : place_for(slots_.rank()));
  }
  // What of a part is moved in this round.
  Range piece_of(std::size_t round, Range part) const {
    const std::size_t begin = std::min(part.end, part.begin + (round - first_piece_) * piece_);
    return {begin, std::min(part.end, begin + piece_)};
  }
  void write_piece(std::byte* to, std::size_t round, int destination) const {
    const Range piece = piece_of(round, parts_.given_to(destination));
    copy_bytes(to, parts_.data() + piece.begin, piece.size());
  }
  // The next reader of a large output finds little of it in the caches either way.
  void deliver(Range to, const std::byte* from) const {
    std::byte* const output = parts_.output() + to.begin;
    if (streams_ && output != from && to.size() > 0)
      stream_copy(output, from, to.size());
    else
      copy_bytes(output, from, to.size());
  }

  void keep_own(std::size_t round) const {
    const Range from = piece_of(round, parts_.given_to(slots_.rank()));
    deliver(piece_of(round, parts_.taken_from(slots_.rank())), parts_.data() + from.begin);
  }

  // Uneven all_to_all: no rank knows how much the others exchange, so the first round carries every rank's counts.
  void write_counts() const {
    const std::size_t bytes = d_.input_counts.size() * sizeof(std::int64_t);
    std::memcpy(slots_.own(0), d_.input_counts.data(), bytes);
    std::memcpy(slots_.own(0) + bytes, d_.output_counts.data(), bytes);
  }
  void read_counts() {
    std::vector<const std::int64_t*> inputs;
    std::vector<const std::int64_t*> outputs;
    std::int64_t longest = 0;
    for (int r = 0; r < slots_.size(); ++r) {
      inputs.push_back(reinterpret_cast<const std::int64_t*>(slots_.of(r, 0)));
      outputs.push_back(inputs.back() + slots_.size());
      longest = std::max(longest, *std::max_element(inputs.back(), inputs.back() + slots_.size()));
    }
    const std::string mismatch = all_to_all_mismatch(inputs, outputs);
    if (!mismatch.empty()) throw CommError(mismatch);
    set_count(static_cast<std::size_t>(longest) * element_size(d_.dtype));
  }

  // reduce_scatter
  void prepare_sum() {
    kernel_ = reduce_kernel(d_.dtype, d_.op);
    sources_.resize(static_cast<std::size_t>(slots_.size()));
    // In place, the lines of the result are in the cache, because this rank's input is there.
    if (streams_ && parts_.output() != parts_.data() + parts_.given_to(slots_.rank()).begin) tile_.resize(kReduceTile);
  }
  // If the result is streamed, it goes through a tile in the L1 cache.
  void sum(std::size_t round) {
    const Range own = piece_of(round, parts_.given_to(slots_.rank()));
    if (own.size() == 0) return;
    for (int r = 0; r < slots_.size(); ++r)
      sources_[static_cast<std::size_t>(r)] = r == slots_.rank() ? parts_.data() + own.begin : written_by(r, round);
    const std::size_t width = element_size(d_.dtype);
    std::byte* const to = parts_.output() + piece_of(round, parts_.taken_from(slots_.rank())).begin;
    if (tile_.empty()) return kernel_(to, sources_.data(), slots_.size(), own.size() / width);
    for (std::size_t at = 0; at < own.size(); at += tile_.size()) {
      const std::size_t bytes = std::min(tile_.size(), own.size() - at);
      kernel_(tile_.data(), sources_.data(), slots_.size(), bytes / width);
      stream_copy(to + at, tile_.data(), bytes);
      for (const void*& source : sources_) source = static_cast<const std::byte*>(source) + bytes;
    }
  }

  const Slots slots_;
  const OperationDescription& d_;
  const CollectiveParts parts_;
  const bool writes_, reads_;  // slots
  const bool keeps_own_;       // copies a part from its own input to its output, after the others
  const bool one_piece_;       // a slot holds one piece for all
  const bool streams_;
  const std::size_t first_piece_;  // round of the first piece: 1 if round 0 carries counts
  const std::size_t piece_;        // bytes
  ReduceKernel kernel_ = nullptr;  // reduce_scatter only
  std::vector<const void*> sources_;
  std::vector<std::byte> tile_;  // empty: reduces directly into the result
};

}  // namespace

void make_slot_rounds(RoundsHolder& rounds, const OperationDescription& description, ControlBlock& control_block,
                      const ShmSegment& segment, std::uint64_t first_round) {
  if (description.verb == Verb::all_reduce || description.verb == Verb::reduce)
    rounds.emplace<SlotReduce>(description, control_block, segment, first_round);
  else
    rounds.emplace<SlotExchange>(description, control_block, segment, first_round);
}

}  // namespace phalanx
