#include "phalanx/comm/backends/local_shm/shm_collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/local_shm/direct_operation.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/slices.h"
#include "phalanx/comm/stream_copy.h"

namespace phalanx {
namespace {

constexpr std::size_t kOneShotBytes = 16U << 10;
// For a message larger than the caches, smaller chunks are still in the second-level cache when they are copied out.
// For a smaller message fewer waits are better. It depends on the size only: all ranks must agree.
constexpr std::size_t kLargeBytes = 8U << 20;
constexpr std::size_t kLargeChunk = 256U << 10;
// Data in symmetric memory of at least this size is not copied to slots: two short waits replace two copies. On two
// idle cores it is as fast from 8 KiB up (benchmarks/results/copy_strategies.md); if ranks compete for a core a wait
// costs more.
constexpr std::size_t kDirectBytes = 16U << 10;
constexpr std::size_t kReduceTile = 16U << 10;  // bytes; reduced, then copied to the slot while in the L1 cache

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

// The part of a rank's data that peers would read, if they can access it. Empty if they cannot, or if it is not worth a
// second round.
struct Reach {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

Reach reach_of(const OperationDescription& d) {
  const std::size_t width = element_size(d.dtype);
  const void* data = d.input;
  std::int64_t count = d.input_count;
  if (d.verb == Verb::all_reduce || d.verb == Verb::reduce || d.verb == Verb::broadcast) {
    data = d.output;
    count = d.output_count;
  } else if (d.verb == Verb::barrier || d.verb == Verb::scatter || !d.input_counts.empty()) {
    return {};  // in uneven all_to_all no rank knows the others' counts
  }
  const std::size_t bytes = static_cast<std::size_t>(count) * width;
  if (bytes < kDirectBytes) return {};
  return {static_cast<const std::byte*>(data), bytes};
}

class ShmOperation : public DirectOperation {
 public:
  ShmOperation(ControlBlock& control_block, const ShmSegment& segment, ShmWindows& windows,
               const OperationDescription& description)
      : DirectOperation(control_block, description),
        segment_(segment),
        width_(element_size(description.dtype)),
        streams_(static_cast<std::size_t>(description.output_count) * width_ >= kStreamBytes) {
    const Reach reach = reach_of(description);
    if (!reach.data || control_block.size() == 1) return;
    window_ = windows.find(reach.data, reach.bytes);
    if (window_) offset_ = window_->offset_of(reach.data);
  }

  bool retire() noexcept final {
    // If some rank's data is in no window, no peer has begun, nor will.
    if (!window_ || (has_published() && control_block_.first_behind(first_round_) < 0 && !are_all_in_one_window()))
      return true;
    if (DirectOperation::retire()) return true;
    if (!has_timed_out()) return false;
    // A stopped peer may still work on it. It has the memory mapped, whatever happens to it here.
    window_->abandon(window_->part(rank()) + offset_);
    return true;
  }

 protected:
  /// Through the slots.
  virtual Progress slot_step() = 0;
  virtual void write_first_slot() {}

  int rank() const { return control_block_.rank(); }
  int size() const { return control_block_.size(); }
  std::byte* output() const { return static_cast<std::byte*>(description_.output); }
  const std::byte* input() const { return static_cast<const std::byte*>(description_.input); }
  std::byte* slot(int of, std::size_t stage) const { return segment_.slot(of, first_round_ + stage); }
  // Copies into the output. The next reader of a large output finds little of it in the caches either way.
  void deliver(std::byte* to, const std::byte* from, std::size_t bytes) const {
    if (to == from || bytes == 0) return;
    if (streams_)
      stream_copy(to, from, bytes);
    else
      std::memcpy(to, from, bytes);
  }
  // Starts with the next rank, so that not all read the same one at once.
  template <class Body>
  void for_each_peer(Body body) const {
    for (int k = 1; k < size(); ++k) body((rank() + k) % size());
  }

  const ShmSegment& segment_;
  const std::size_t width_;
  const bool streams_;

 private:
  void write_first_round() final {
    if (!window_) return write_first_slot();
    RoundHeader& header = control_block_.header(rank(), first_round_);
    header.window = window_->number();
    header.offset = offset_;
  }
  bool starts_again() final {
    const bool are_all = are_all_in_one_window();
    bool is_any = false;
    for (int r = 0; r < size(); ++r) is_any |= window_of(r) != 0;
    if (!are_all) window_ = nullptr;
    return is_any && !are_all;
  }
  std::uint64_t window_of(int r) const { return control_block_.header(r, first_round_).window; }
  bool are_all_in_one_window() const {
    for (int r = 0; r < size(); ++r)
      if (window_of(r) == 0 || window_of(r) != window_of(rank())) return false;
    return true;
  }
  Progress step() final { return window_ ? DirectOperation::step() : slot_step(); }
  std::vector<PeerBuffers> peers() final {
    std::vector<PeerBuffers> all;
    for (int r = 0; r < size(); ++r) {
      std::byte* const data = window_->part(r) + control_block_.header(r, first_round_).offset;
      all.push_back({.input = data, .output = data});
    }
    return all;
  }
  void leave_peers() noexcept final { window_->leave_peers(); }
  bool has_ended(int peer) const noexcept final { return !control_block_.death_reason(peer).empty(); }

  std::shared_ptr<ShmWindow> window_;  // null: through the slots
  std::size_t offset_ = 0;
};

class ShmBarrier final : public ShmOperation {
 public:
  using ShmOperation::ShmOperation;

 private:
  Progress slot_step() override { return Progress::done; }
};

// --- exchange --------------------------------------------------------------------------------------------------------

class ShmExchange : public ShmOperation {
 public:
  using ShmOperation::ShmOperation;

 protected:
  virtual void write_piece(std::size_t piece) = 0;
  virtual void read_piece(std::size_t piece) = 0;
  // Called right after a piece was written and published, while it is in the cache: copies this rank's part of it into
  // the result.
  virtual void keep_piece(std::size_t) {}

  // Set by the constructors.
  std::size_t pieces_ = 1;
  std::size_t piece_bytes_ = 0;
  bool writes_ = true;
  bool reads_ = true;
  int only_source_ = -1;  // rooted verbs: the one rank that writes

  static std::size_t pieces_for(std::size_t bytes, std::size_t piece) {
    return std::max<std::size_t>(1, (bytes + piece - 1) / piece);
  }
  // Bytes [begin, end) of piece `piece` of a part.
  Range piece_range(std::size_t piece, std::size_t part_bytes) const {
    const std::size_t begin = std::min(part_bytes, piece * piece_bytes_);
    return {begin, std::min(part_bytes, begin + piece_bytes_)};
  }

  Progress slot_step() override {
    if (kept_ < next_) keep_piece(kept_++);
    if (next_ < pieces_) {
      // A writer must not overtake any rank by more than the buffers allow; a reader needs only its source.
      if (!(writes_ || only_source_ < 0 ? await_all(first_round_ + next_ - 1)
                                        : await(only_source_, first_round_ + next_ - 1)))
        return Progress::blocked;
      if (writes_) write_piece(next_);
      control_block_.publish(first_round_ + next_);
      if (reads_) read_piece(next_ - 1);
      ++next_;
      return Progress::moved;
    }
    if (reads_) {
      if (!(only_source_ < 0 ? await_all(first_round_ + pieces_ - 1) : await(only_source_, first_round_ + pieces_ - 1)))
        return Progress::blocked;
      read_piece(pieces_ - 1);
    }
    return Progress::done;
  }

 private:
  void write_first_slot() override {
    if (writes_) write_piece(0);
  }

  std::size_t next_ = 1;
  std::size_t kept_ = 0;
};

// broadcast, all_gather, gather: what a rank writes is read by all the others, or by the root.
class ShmGather final : public ShmExchange {
 public:
  ShmGather(ControlBlock& control_block, const ShmSegment& segment, ShmWindows& windows, const OperationDescription& d)
      : ShmExchange(control_block, segment, windows, d) {
    // Smaller pieces are no faster on idle cores (benchmarks/results/copy_strategies.md), and cost more waits on busy
    // ones.
    piece_bytes_ = segment.layout().slot_bytes;
    std::size_t longest = 0;
    if (d.verb == Verb::broadcast) {
      only_source_ = d.root;
      writes_ = rank() == d.root;
      reads_ = !writes_;
      longest = static_cast<std::size_t>(d.output_count);
    } else {
      longest = static_cast<std::size_t>(d.input_count);
      for (std::int64_t count : d.counts) longest = std::max(longest, static_cast<std::size_t>(count));
      if (d.verb == Verb::gather) {
        writes_ = rank() != d.root;
        reads_ = !writes_;
      }
    }
    pieces_ = pieces_for(longest * width_, piece_bytes_);
  }

 private:
  void write_piece(std::size_t piece) override {
    const bool is_broadcast = description_.verb == Verb::broadcast;
    const auto count = static_cast<std::size_t>(is_broadcast ? description_.output_count : description_.input_count);
    const Range range = piece_range(piece, count * width_);
    copy_bytes(slot(rank(), piece), (is_broadcast ? output() : input()) + range.begin, range.size());
  }

  void read_piece(std::size_t piece) override {
    if (description_.verb == Verb::broadcast) {
      const Range range = piece_range(piece, static_cast<std::size_t>(description_.output_count) * width_);
      deliver(output() + range.begin, slot(description_.root, piece), range.size());
      return;
    }
    for_each_peer([&](int source) { read_part(source, piece, slot(source, piece)); });
    if (!writes_) keep_own(piece);
  }

  void keep_piece(std::size_t piece) override {
    if (description_.verb == Verb::all_gather) keep_own(piece);
  }
  void keep_own(std::size_t piece) { read_part(rank(), piece, nullptr); }

  void read_part(int source, std::size_t piece, const std::byte* slot) {
    const Range part = part_of(description_.counts, description_.input_count, source);
    const Range range = piece_range(piece, part.size() * width_);
    deliver(output() + part.begin * width_ + range.begin, source == rank() ? input() + range.begin : slot,
            range.size());
  }
};

// reduce_scatter, scatter, all_to_all: a slot holds one part for each destination.
class ShmScatter final : public ShmExchange {
 public:
  ShmScatter(ControlBlock& control_block, const ShmSegment& segment, ShmWindows& windows, const OperationDescription& d)
      : ShmExchange(control_block, segment, windows, d) {
    piece_bytes_ = segment.layout().slot_bytes / static_cast<std::size_t>(size()) / 64 * 64;
    auto longest = static_cast<std::size_t>(d.output_count);
    if (d.verb == Verb::scatter) {
      only_source_ = d.root;
      writes_ = rank() == d.root;
    } else if (d.verb == Verb::reduce_scatter) {
      for (std::int64_t count : d.counts) longest = std::max(longest, static_cast<std::size_t>(count));
      kernel_ = reduce_kernel(d.dtype, d.op);
      sources_.resize(static_cast<std::size_t>(size()));
      // In place, the lines of the result are in the cache, because this rank's input is there.
      const std::byte* own = input() + part_of(d.counts, d.output_count, rank()).begin * width_;
      if (streams_ && output() != own) tile_.resize(kReduceTile);
    } else {
      longest /= static_cast<std::size_t>(size());
      counts_in_first_piece_ = !d.input_counts.empty();
    }
    pieces_ = pieces_for(longest * width_, piece_bytes_) + (counts_in_first_piece_ ? 1 : 0);
  }

 private:
  // Uneven all_to_all: no rank knows how much the others exchange, so the first round carries every rank's counts.
  void write_counts() const {
    const std::size_t bytes = description_.input_counts.size() * sizeof(std::int64_t);
    std::memcpy(slot(rank(), 0), description_.input_counts.data(), bytes);
    std::memcpy(slot(rank(), 0) + bytes, description_.output_counts.data(), bytes);
  }
  void read_counts() {
    std::vector<const std::int64_t*> inputs;
    std::vector<const std::int64_t*> outputs;
    std::int64_t longest = 0;
    for (int r = 0; r < size(); ++r) {
      inputs.push_back(reinterpret_cast<const std::int64_t*>(slot(r, 0)));
      outputs.push_back(inputs.back() + size());
      longest = std::max(longest, *std::max_element(inputs.back(), inputs.back() + size()));
    }
    const std::string mismatch = all_to_all_mismatch(inputs, outputs);
    if (!mismatch.empty()) throw CommError(mismatch);
    pieces_ = 1 + pieces_for(static_cast<std::size_t>(longest) * width_, piece_bytes_);
  }
  Progress slot_step() override {
    if (counts_in_first_piece_ && !counts_are_read_) {
      read_counts();
      counts_are_read_ = true;
    }
    return ShmExchange::slot_step();
  }

  std::int64_t even_part() const {
    return description_.verb == Verb::all_to_all ? description_.input_count / size() : description_.output_count;
  }
  const std::vector<std::int64_t>& outgoing() const {
    return description_.verb == Verb::all_to_all ? description_.input_counts : description_.counts;
  }

  void write_piece(std::size_t stage) override {
    if (counts_in_first_piece_ && stage == 0) return write_counts();
    const std::size_t piece = stage - (counts_in_first_piece_ ? 1 : 0);
    for_each_peer([&](int destination) {
      const Range part = part_of(outgoing(), even_part(), destination);
      const Range range = piece_range(piece, part.size() * width_);
      copy_bytes(slot(rank(), stage) + static_cast<std::size_t>(destination) * piece_bytes_,
                 input() + part.begin * width_ + range.begin, range.size());
    });
  }

  void read_piece(std::size_t stage) override {
    if (counts_in_first_piece_ && stage == 0) return;
    const std::size_t piece = stage - (counts_in_first_piece_ ? 1 : 0);
    const auto own_place = static_cast<std::size_t>(rank()) * piece_bytes_;
    const Range own_out = part_of(outgoing(), even_part(), rank());
    if (description_.verb == Verb::reduce_scatter) {
      const Range range = piece_range(piece, own_out.size() * width_);
      if (range.size() == 0) return;
      for (int r = 0; r < size(); ++r)
        sources_[static_cast<std::size_t>(r)] =
            r == rank() ? input() + own_out.begin * width_ + range.begin : slot(r, stage) + own_place;
      reduce_piece(output() + range.begin, range.size());
    } else if (description_.verb == Verb::scatter) {
      const Range range = piece_range(piece, static_cast<std::size_t>(description_.output_count) * width_);
      deliver(output() + range.begin,
              rank() == description_.root ? input() + own_out.begin * width_ + range.begin
                                          : slot(description_.root, stage) + own_place,
              range.size());
    } else {
      const auto read = [&](int source) {
        const Range part = part_of(description_.output_counts, even_part(), source);
        const Range range = piece_range(piece, part.size() * width_);
        deliver(output() + part.begin * width_ + range.begin,
                source == rank() ? input() + own_out.begin * width_ + range.begin : slot(source, stage) + own_place,
                range.size());
      };
      for_each_peer(read);
      read(rank());
    }
  }

  // Reduces from sources_; if the result is streamed, through a tile in the L1 cache.
  void reduce_piece(std::byte* to, std::size_t bytes) {
    if (tile_.empty()) return kernel_(to, sources_.data(), size(), bytes / width_);
    for (std::size_t at = 0; at < bytes; at += tile_.size()) {
      const std::size_t part = std::min(tile_.size(), bytes - at);
      kernel_(tile_.data(), sources_.data(), size(), part / width_);
      stream_copy(to + at, tile_.data(), part);
      for (const void*& source : sources_) source = static_cast<const std::byte*>(source) + part;
    }
  }

  ReduceKernel kernel_ = nullptr;
  std::vector<const void*> sources_;
  std::vector<std::byte> tile_;  // empty: reduces directly into the result
  bool counts_in_first_piece_ = false;
  bool counts_are_read_ = false;
};

// --- all_reduce and reduce -------------------------------------------------------------------------------------------

class ShmReduce final : public ShmOperation {
 public:
  ShmReduce(ControlBlock& control_block, const ShmSegment& segment, ShmWindows& windows, const OperationDescription& d)
      : ShmOperation(control_block, segment, windows, d),
        kernel_(reduce_kernel(d.dtype, d.op)),
        count_(static_cast<std::size_t>(d.output_count)),
        gets_result_(d.verb == Verb::all_reduce || d.root == rank()),
        sources_(static_cast<std::size_t>(size())) {
    const std::size_t bytes = count_ * width_;
    if (bytes <= kOneShotBytes || size() == 1) return;  // alone, the tensor is its own result
    const std::size_t slot_bytes = segment.layout().slot_bytes;
    const std::size_t per_slot = (bytes >= kLargeBytes ? std::min(slot_bytes, kLargeChunk) : slot_bytes) / width_;
    // Equal chunks: a short last one would cost as many waits as a full one.
    chunks_ = (count_ + per_slot - 1) / per_slot;
    chunk_ = std::min(per_slot, ((count_ + chunks_ - 1) / chunks_ + 63) / 64 * 64);
    chunks_ = (count_ + chunk_ - 1) / chunk_;
  }

 private:
  bool is_one_shot() const { return chunks_ == 0; }
  Range chunk_range(std::size_t chunk) const {
    return {std::min(count_, chunk * chunk_), std::min(count_, (chunk + 1) * chunk_)};
  }

  void write_first_slot() override {
    if (size() == 1) return;
    if (!is_one_shot())
      write_chunk(0);
    else if (description_.verb == Verb::all_reduce || !gets_result_)
      copy_bytes(slot(rank(), 0), output(), count_ * width_);
  }

  Progress slot_step() override {
    if (is_one_shot()) {
      if (gets_result_ && count_ > 0 && size() > 1) reduce(output(), nullptr, 0, {0, count_}, 0);
      return Progress::done;
    }
    if (!await_all(first_round_ + stage_ - 1)) return Progress::blocked;
    if (stage_ >= 2) read_results(stage_ - 2);
    if (stage_ > chunks_) return Progress::done;
    reduce_slice(stage_ - 1);
    if (stage_ < chunks_) write_chunk(stage_);
    control_block_.publish(first_round_ + stage_);
    ++stage_;
    return Progress::moved;
  }

  void write_chunk(std::size_t chunk) {
    const Range range = chunk_range(chunk);
    for_each_peer([&](int peer) {
      const Range slice = slice_of(range.size(), size(), peer);
      copy_bytes(slot(rank(), chunk) + slice.begin * width_, output() + (range.begin + slice.begin) * width_,
                 slice.size() * width_);
    });
  }

  void reduce_slice(std::size_t chunk) {
    const Range range = chunk_range(chunk);
    const Range slice = slice_of(range.size(), size(), rank());
    std::byte* shared = slot(rank(), chunk);
    const std::size_t tile = kReduceTile / width_;
    for (std::size_t at = slice.begin; at < slice.end; at += tile) {
      const Range part{at, std::min(slice.end, at + tile)};
      std::byte* own = output() + range.begin * width_;
      if (gets_result_)
        reduce(own + at * width_, description_.verb == Verb::all_reduce ? shared + at * width_ : nullptr, range.begin,
               part, chunk);
      else
        reduce(shared + at * width_, nullptr, range.begin, part, chunk);
    }
  }

  // Reduces elements `part` of the chunk that starts at `base` into `to`, and copies them to `also`.
  void reduce(std::byte* to, std::byte* also, std::size_t base, Range part, std::size_t stage) {
    for (int r = 0; r < size(); ++r)
      sources_[static_cast<std::size_t>(r)] =
          r == rank() ? output() + (base + part.begin) * width_ : slot(r, stage) + part.begin * width_;
    kernel_(to, sources_.data(), size(), part.size());
    if (also) std::memcpy(also, to, part.size() * width_);
  }

  void read_results(std::size_t chunk) {
    if (!gets_result_) return;
    const Range range = chunk_range(chunk);
    for_each_peer([&](int peer) {
      const Range slice = slice_of(range.size(), size(), peer);
      copy_bytes(output() + (range.begin + slice.begin) * width_, slot(peer, chunk) + slice.begin * width_,
                 slice.size() * width_);
    });
  }

  ReduceKernel kernel_;
  std::size_t count_;
  bool gets_result_;
  std::vector<const void*> sources_;
  std::size_t chunks_ = 0;  // 0: one shot
  std::size_t chunk_ = 0;   // elements
  std::size_t stage_ = 1;
};

}  // namespace

std::unique_ptr<Operation> make_shm_collective(ControlBlock& control_block, const ShmSegment& segment,
                                               ShmWindows& windows, const OperationDescription& description) {
  switch (description.verb) {
    case Verb::all_reduce:
    case Verb::reduce:
      return std::make_unique<ShmReduce>(control_block, segment, windows, description);
    case Verb::broadcast:
    case Verb::all_gather:
    case Verb::gather:
      return std::make_unique<ShmGather>(control_block, segment, windows, description);
    case Verb::reduce_scatter:
    case Verb::scatter:
    case Verb::all_to_all:
      return std::make_unique<ShmScatter>(control_block, segment, windows, description);
    default:
      return std::make_unique<ShmBarrier>(control_block, segment, windows, description);
  }
}

}  // namespace phalanx
