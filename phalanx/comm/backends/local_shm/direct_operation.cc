#include "phalanx/comm/backends/local_shm/direct_operation.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/stream_copy.h"

namespace phalanx {
namespace {

constexpr std::size_t kPiece = 1U << 20;  // bytes copied or reduced by one step
// After an abort a peer finishes its piece and leaves. If that takes longer than this, its process was stopped.
constexpr std::chrono::seconds kPatience{1};
constexpr std::size_t kTile = 1U << 14;  // reduced, then copied to the peers while in the L1 cache

}  // namespace

// A rank works on its peers' buffers only if it has seen all ranks publish the first round and then no abort. So if the
// abort is visible, and some rank has not published after that, no rank ever will work on them. Otherwise some ranks
// may be working: each one publishes when it no longer needs our buffers, as this rank does here.
bool DirectOperation::retire() noexcept {
  if (!has_published()) return true;
  if (!control_block_.aborted()) return false;  // another thread is writing the reason
  if (control_block_.round() == first_round_) {
    const auto first = static_cast<std::uint32_t>(first_round_);
    // Read-modify-write: in a single total order with the peers' publishing and their check of the abort.
    for (int peer = 0; peer < control_block_.size(); ++peer)
      is_alone_ |= static_cast<std::int32_t>(control_block_.of(peer).published.fetch_add(0, std::memory_order_seq_cst) -
                                             first) < 0;
    control_block_.of(control_block_.rank()).left_in.store(first, std::memory_order_release);
    control_block_.publish(first_round_ + 1);
  }
  if (is_alone_) return true;
  for (int peer = 0; peer < control_block_.size(); ++peer)
    if (peer != control_block_.rank() && !control_block_.reached(peer, first_round_ + 1) && !has_ended(peer))
      return false;
  return true;
}

Progress DirectOperation::step() {
  if (!is_work_done_) {
    control_block_.throw_if_aborted();
    ignores_abort_ = true;
    is_work_done_ = work();
    if (!is_work_done_) return Progress::moved;
    control_block_.publish(first_round_ + 1);
    leave_peers();
  }
  if (!await_all(first_round_ + 1)) {
    if (control_block_.aborted() && has_timed_out()) control_block_.throw_if_aborted();
    return Progress::blocked;
  }
  if (!error_.empty()) throw CommError(error_);
  throw_if_left(first_round_);  // a peer may have left our buffers without having done its part
  return Progress::done;
}

bool DirectOperation::has_timed_out() {
  const auto now = std::chrono::steady_clock::now();
  if (!retiring_since_) retiring_since_ = now;
  return now - *retiring_since_ > kPatience;
}

bool DirectOperation::work() {
  if (!is_planned_) {
    is_planned_ = true;
    plan();
  }
  if (next_copy_ < copies_.size())
    copy_piece();
  else if (range_.size() > 0)
    reduce_piece();
  return next_copy_ == copies_.size() && range_.size() == 0;
}

void DirectOperation::plan() {
  peers_ = peers();
  const int rank = control_block_.rank();
  auto* const output = static_cast<std::byte*>(description_.output);
  if (!reduces(description_.verb)) return plan_copies();
  inputs_.resize(peers_.size());
  if (description_.verb == Verb::reduce_scatter) {
    range_ = part_of(description_.counts, description_.output_count, rank);
    target_ = output - range_.begin * width();
    for (const PeerBuffers& peer : peers_) sources_.push_back(peer.input);
    return;
  }
  range_ = slice_of(static_cast<std::size_t>(description_.output_count), control_block_.size(), rank);
  const bool to_all = description_.verb == Verb::all_reduce;
  target_ = to_all ? output : peers_[static_cast<std::size_t>(description_.root)].output;
  for (int k = 0; k < control_block_.size(); ++k) {
    sources_.push_back(peers_[static_cast<std::size_t>(k)].output);
    // Starts with the next rank, so that not all write to the same one at once.
    if (to_all && k > 0) also_.push_back(peers_[static_cast<std::size_t>((rank + k) % control_block_.size())].output);
  }
}

void DirectOperation::plan_copies() {
  const OperationDescription& d = description_;
  const int size = control_block_.size();
  const int rank = control_block_.rank();
  const auto own = static_cast<std::size_t>(rank);
  auto* const output = static_cast<std::byte*>(d.output);
  streamed_left_ = streamed_part(static_cast<std::size_t>(d.output_count) * width(),
                                 static_cast<std::size_t>(d.input_count + d.output_count) * width(), size);
  const auto peer = [&](int r) -> const PeerBuffers& { return peers_[static_cast<std::size_t>(r)]; };
  // Starts with the next rank, so that all do not read the same one at once; ends with this one.
  const auto for_each = [&](auto body) {
    for (int k = 1; k <= size; ++k) body((rank + k) % size);
  };
  switch (d.verb) {
    case Verb::broadcast: {
      // The root has nothing to copy for itself. So it does a share of each other rank's copy, as large as the rank's
      // own.
      const Range by_root = slice_of(static_cast<std::size_t>(d.output_count), size, size - 1);
      const auto copy = [&](std::byte* to, const std::byte* from, Range part) {
        plan_copy(to + part.begin * width(), from + part.begin * width(), part.size());
      };
      if (rank != d.root) return copy(output, peer(d.root).output, {0, by_root.begin});
      return for_each([&](int r) { copy(peer(r).output, output, by_root); });
    }
    case Verb::all_gather:
      return for_each([&](int r) {
        const Range part = part_of(d.counts, d.input_count, r);
        plan_copy(output + part.begin * width(), peer(r).input, part.size());
      });
    case Verb::gather:
      if (rank != d.root) return;
      return for_each([&](int r) {
        const auto part = static_cast<std::size_t>(d.input_count);
        plan_copy(output + static_cast<std::size_t>(r) * part * width(), peer(r).input, part);
      });
    case Verb::scatter: {
      const auto part = static_cast<std::size_t>(d.output_count);
      plan_copy(output, peer(d.root).input + own * part * width(), part);
      return;
    }
    case Verb::all_to_all: {
      if (!d.input_counts.empty()) {
        std::vector<const std::int64_t*> inputs;
        std::vector<const std::int64_t*> outputs;
        for (const PeerBuffers& one : peers_) {
          inputs.push_back(one.input_counts->data());
          outputs.push_back(one.output_counts->data());
        }
        error_ = all_to_all_mismatch(inputs, outputs);
        if (!error_.empty()) return;
      }
      const std::int64_t even = d.input_count / size;
      return for_each([&](int r) {
        static const std::vector<std::int64_t> kEven;
        const Range from = part_of(d.input_counts.empty() ? kEven : *peer(r).input_counts, even, rank);
        const Range to = part_of(d.output_counts, even, r);
        plan_copy(output + to.begin * width(), peer(r).input + from.begin * width(), to.size());
      });
    }
    default:
      return;  // barrier
  }
}

void DirectOperation::plan_copy(std::byte* to, const std::byte* from, std::size_t elements) {
  if (to != from && elements > 0) copies_.push_back({to, from, elements * width()});
}

void DirectOperation::copy_piece() {
  Copy& copy = copies_[next_copy_];
  const std::size_t bytes = std::min(copy.bytes, kPiece);
  if (streamed_left_ > 0)
    stream_copy(copy.to, copy.from, bytes);
  else
    std::memcpy(copy.to, copy.from, bytes);
  streamed_left_ -= std::min(streamed_left_, bytes);
  copy = {copy.to + bytes, copy.from + bytes, copy.bytes - bytes};
  if (copy.bytes == 0) ++next_copy_;
}

void DirectOperation::reduce_piece() {
  const ReduceKernel kernel = reduce_kernel(description_.dtype, description_.op);
  const std::size_t tile = kTile / width();
  const std::size_t piece_end = std::min(range_.end, range_.begin + kPiece / width());
  while (range_.begin < piece_end) {
    const std::size_t count = std::min(tile, piece_end - range_.begin);
    const std::size_t at = range_.begin * width();
    for (std::size_t r = 0; r < sources_.size(); ++r) inputs_[r] = sources_[r] + at;
    kernel(target_ + at, inputs_.data(), control_block_.size(), count);
    for (std::byte* const also : also_) std::memcpy(also + at, target_ + at, count * width());
    range_.begin += count;
  }
}

}  // namespace phalanx
