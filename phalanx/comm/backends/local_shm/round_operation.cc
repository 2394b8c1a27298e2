#include "phalanx/comm/backends/local_shm/round_operation.h"

#include <fmt/format.h>

#include <span>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"

namespace phalanx {
namespace {

// Data in symmetric memory of at least this size is not copied to slots: two short waits replace two copies. On two
// idle cores it is as fast from 8 KiB up (benchmarks/results/copy_strategies.md); if ranks compete for a core a wait
// costs more.
constexpr std::size_t kDirectBytes = 16U << 10;
// After an abort a peer finishes its piece and leaves. If that takes longer than this, its process was stopped.
constexpr std::chrono::seconds kPatience{1};

// The data of a rank that peers would read, if they can access it. Empty if they cannot, or if it is not worth a second
// round.
std::span<const std::byte> readable_data(const OperationDescription& d) {
  // In uneven all_to_all no rank knows the others' counts.
  if (d.verb == Verb::barrier || d.verb == Verb::scatter || !d.input_counts.empty()) return {};
  const bool is_output = d.verb == Verb::all_reduce || d.verb == Verb::reduce || d.verb == Verb::broadcast;
  const std::size_t bytes =
      static_cast<std::size_t>(is_output ? d.output_count : d.input_count) * element_size(d.dtype);
  if (bytes < kDirectBytes) return {};
  return {static_cast<const std::byte*>(is_output ? d.output : d.input), bytes};
}

}  // namespace

RoundOperation::RoundOperation(ControlBlock& control_block, const OperationDescription& description)
    : control_block_(control_block), description_(description), first_round_(control_block.round() + 1) {
  control_block.throw_if_aborted();
}

RoundOperation::RoundOperation(ControlBlock& control_block, const OperationDescription& description,
                               const ShmSegment& segment, ShmWindows& windows)
    : RoundOperation(control_block, description) {
  segment_ = &segment;
  const auto data = readable_data(description);
  if (data.empty() || control_block.size() == 1) return;
  window_ = windows.find(data.data(), data.size());
  if (window_) offset_ = window_->offset_of(data.data());
}

Progress RoundOperation::advance() {
  const Progress progress = step();
  // reached() is checked again after the abort: if a peer failed because of what all ranks published, this rank finds
  // the same error itself.
  if (progress == Progress::blocked && !peers_use_buffers_ && control_block_.aborted() &&
      !control_block_.reached(awaited_, awaited_round_))
    control_block_.throw_if_aborted();
  return progress;
}

Progress RoundOperation::step() {
  switch (state_) {
    case State::first_round:
      if (!await(kAll, first_round_ - 1)) return Progress::blocked;
      publish_first_round();
      state_ = State::compare;
      [[fallthrough]];
    case State::compare:
      if (!await(kAll, first_round_)) return Progress::blocked;
      compare_signatures();
      choose_path();
      return state_ == State::again ? Progress::moved : step();
    case State::again:
      if (!await(kAll, first_round_)) return Progress::blocked;
      control_block_.throw_if_left(first_round_ - 1);
      state_ = State::rounds;
      rounds_->copy_own(0);
      [[fallthrough]];
    case State::rounds:
      return step_rounds();
  }
  return Progress::done;
}

void RoundOperation::publish_first_round() {
  PHALANX_ASSERT(control_block_.round() + 1 == first_round_, "operations of a rank begin in order");
  RoundHeader& header = control_block_.header(control_block_.rank(), first_round_);
  header.signature = signature_of(description_);
  header.description = &description_;
  header.window = window_ ? window_->number() : 0;
  header.offset = offset_;
  if (is_direct())
    control_block_.publish(first_round_);
  else
    start_slots();
}

void RoundOperation::compare_signatures() {
  const Signature& mine = control_block_.header(control_block_.rank(), first_round_).signature;
  bool equal = true;
  for (int peer = 0; peer < control_block_.size(); ++peer)
    if (peer != control_block_.rank()) equal &= control_block_.header(peer, first_round_).signature == mine;
  if (equal) return;
  std::vector<Signature> all;
  for (int peer = 0; peer < control_block_.size(); ++peer)
    all.push_back(control_block_.header(peer, first_round_).signature);
  require_equal_signatures(all);
}

RoundOperation::Windows RoundOperation::windows() const {
  const std::uint64_t own = control_block_.header(control_block_.rank(), first_round_).window;
  std::uint64_t any = 0, others = 0;
  for (int peer = 0; peer < control_block_.size(); ++peer) {
    const std::uint64_t window = control_block_.header(peer, first_round_).window;
    any |= window;
    others |= window ^ own;
  }
  if (any == 0) return Windows::none;
  return others == 0 ? Windows::one : Windows::some;
}

// All ranks choose the same, because all see the same headers.
void RoundOperation::choose_path() {
  state_ = State::rounds;
  const Windows in_windows = segment_ ? windows() : Windows::one;
  if (in_windows == Windows::one) {
    control_block_.throw_if_aborted();  // otherwise a peer may have given up its buffers (retire)
    peers_use_buffers_ = true;
    return make_direct_rounds(rounds_, description_, control_block_.rank(), buffers());
  }
  window_ = nullptr;
  if (in_windows == Windows::none) return rounds_->copy_own(0);
  state_ = State::again;
  ++first_round_;
  start_slots();
}

void RoundOperation::start_slots() {
  make_slot_rounds(rounds_, description_, control_block_, *segment_, first_round_);
  rounds_->write(0);
  control_block_.publish(first_round_);
}

std::vector<RankBuffers> RoundOperation::buffers() const {
  std::vector<RankBuffers> all;
  all.reserve(static_cast<std::size_t>(control_block_.size()));
  for (int r = 0; r < control_block_.size(); ++r) {
    const RoundHeader& header = control_block_.header(r, first_round_);
    if (window_) {
      std::byte* const data = window_->part(r) + header.offset;
      all.push_back({.input = data, .output = data});
    } else {
      const OperationDescription& d = *header.description;
      all.push_back({static_cast<const std::byte*>(d.input), static_cast<std::byte*>(d.output), &d.input_counts,
                     &d.output_counts});
    }
  }
  return all;
}

// After the last round was published there is only something to read.
Progress RoundOperation::step_rounds() {
  const bool is_last = next_ == rounds_->count();
  const int awaited = is_last ? rounds_->awaited_to_read() : rounds_->awaited_to_write();
  if (next_ > 1 && !await(awaited, first_round_ + next_ - 1)) {  // all have published the first
    if (peers_use_buffers_ && control_block_.aborted() && has_timed_out()) control_block_.throw_if_aborted();
    return Progress::blocked;
  }
  if (!is_last) {
    if (peers_use_buffers_) control_block_.throw_if_aborted();
    if (!rounds_->write(next_)) return Progress::moved;
    control_block_.publish(first_round_ + next_);
    if (window_) window_->leave_peers();
  }
  rounds_->read(next_ - 1);
  if (is_last) {
    // A peer may have left our buffers without having done its part.
    if (peers_use_buffers_) control_block_.throw_if_left(first_round_);
    return Progress::done;
  }
  rounds_->copy_own(next_++);
  return peers_use_buffers_ ? step_rounds() : Progress::moved;
}

// --- waiting and failing ---------------------------------------------------------------------------------------------

bool RoundOperation::await(int rank, std::uint64_t round) {
  int behind = -1;
  if (rank == kAll)
    behind = control_block_.first_behind(round);
  else if (rank != control_block_.rank() && !control_block_.reached(rank, round))
    behind = rank;
  if (behind < 0) return true;
  awaited_ = behind;
  awaited_round_ = round;
  return false;
}

bool RoundOperation::has_timed_out() {
  const auto now = std::chrono::steady_clock::now();
  if (!waits_since_) waits_since_ = now;
  return now - *waits_since_ > kPatience;
}

std::optional<Doorbell> RoundOperation::doorbell() {
  if (awaited_ < 0) return std::nullopt;
  return control_block_.doorbell(awaited_);
}

std::vector<int> RoundOperation::missing_ranks() {
  std::vector<int> missing;
  for (int peer = 0; peer < control_block_.size(); ++peer)
    if (peer != control_block_.rank() && !control_block_.reached(peer, awaited_round_)) missing.push_back(peer);
  return missing;
}

void RoundOperation::check_peers() {
  for (int peer : missing_ranks()) {
    const std::string why = control_block_.death_reason(peer);
    // It may have published its last round just before it ended.
    if (!why.empty() && !control_block_.reached(peer, awaited_round_)) {
      // A rank that failed and ended wrote its reason first: that is the cause, its end is only a consequence.
      if (!peers_use_buffers_) control_block_.throw_if_aborted();
      control_block_.throw_dead(peer, why);
    }
    // The stall reason is read before reached(): a rank that completed this operation may wait in its next one.
    const std::string stuck = control_block_.stall_reason(peer);
    if (!stuck.empty() && !control_block_.reached(peer, awaited_round_))
      throw CommError(fmt::format("the ranks do not call the same operation: {}", stuck));
  }
}

// A rank works on its peers' buffers only if it has seen all ranks publish the first round and then no abort. So if the
// abort is visible, and some rank has not published after that, no rank ever will work on them. Otherwise some ranks
// may be working: each one publishes when it no longer needs our buffers, as this rank does here.
bool RoundOperation::retire() noexcept {
  if (state_ == State::first_round || !is_direct()) return true;
  // If some rank's data is in no window, no peer has begun, nor will.
  if (segment_ && control_block_.first_behind(first_round_) < 0 && windows() != Windows::one) return true;
  if (!control_block_.aborted()) return false;  // another thread is writing the reason
  if (control_block_.round() == first_round_) {
    for (int peer = 0; peer < control_block_.size(); ++peer)
      is_alone_ |= !control_block_.misses_abort(peer, first_round_);
    control_block_.leave();
  }
  bool is_any_at_work = false;
  for (int peer = 0; peer < control_block_.size() && !is_alone_; ++peer)
    is_any_at_work |= peer != control_block_.rank() && !control_block_.reached(peer, first_round_ + 1) &&
                      !(segment_ && !control_block_.death_reason(peer).empty());
  if (!is_any_at_work) return true;
  if (!window_ || !has_timed_out()) return false;
  // A stopped peer may still work on it. It has the memory mapped, whatever happens to it here.
  window_->abandon(window_->part(control_block_.rank()) + offset_);
  return true;
}

}  // namespace phalanx
