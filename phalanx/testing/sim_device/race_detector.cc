#include "phalanx/testing/sim_device/race_detector.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace phalanx::sim_device {

void RaceDetector::access(const Access& access, Stamp stamp, const VectorClock& clock, const char* operation) {
  if (access.bytes == 0) return;
  const auto* begin = static_cast<const std::byte*>(access.begin);
  const std::byte* end = begin + access.bytes;
  split_at(begin);
  split_at(end);
  const Mark mark{stamp, operation};
  if (access.is_write) {
    write(begin, end, mark, clock);
  } else {
    read(begin, end, mark, clock);
  }
}

void RaceDetector::forget(const void* begin, std::size_t bytes) {
  const auto* first = static_cast<const std::byte*>(begin);
  split_at(first);
  split_at(first + bytes);
  ranges_.erase(ranges_.lower_bound(first), ranges_.lower_bound(first + bytes));
}

void RaceDetector::report(std::string text) {
  if (seen_.insert(text).second) reports_.push_back(std::move(text));
}

std::string RaceDetector::place(Stamp stamp) const {
  return stamp.stream < 0 ? "the host" : stream_names_.at(static_cast<std::size_t>(stamp.stream));
}

void RaceDetector::clear_reports() {
  seen_.clear();
  reports_.clear();
}

void RaceDetector::split_at(const std::byte* address) {
  auto range = ranges_.upper_bound(address);
  if (range == ranges_.begin()) return;
  --range;
  if (range->first == address || range->second.end <= address) return;
  Range upper = range->second;
  range->second.end = address;
  ranges_.emplace_hint(std::next(range), address, std::move(upper));
}

void RaceDetector::read(const std::byte* begin, const std::byte* end, const Mark& mark, const VectorClock& clock) {
  auto range = ranges_.lower_bound(begin);
  while (begin < end) {
    if (range == ranges_.end() || range->first > begin) {
      const std::byte* gap_end = range == ranges_.end() ? end : std::min(range->first, end);
      range = ranges_.emplace_hint(range, begin, Range{gap_end, {}, {}});
    }
    auto& [range_end, last_write, reads] = range->second;
    require_order("read after write", last_write, mark, clock);
    const auto own =
        std::ranges::find_if(reads, [&](const Mark& read) { return read.stamp.stream == mark.stamp.stream; });
    if (own != reads.end()) {
      *own = mark;
    } else {
      reads.push_back(mark);
    }
    begin = range_end;
    ++range;
  }
}

void RaceDetector::write(const std::byte* begin, const std::byte* end, const Mark& mark, const VectorClock& clock) {
  auto range = ranges_.lower_bound(begin);
  while (range != ranges_.end() && range->first < end) {
    require_order("write after write", range->second.write, mark, clock);
    for (const Mark& read : range->second.reads) require_order("write after read", read, mark, clock);
    range = ranges_.erase(range);
  }
  ranges_.emplace_hint(range, begin, Range{end, mark, {}});
}

void RaceDetector::require_order(const char* kind, const Mark& before, const Mark& after, const VectorClock& clock) {
  if (clock.covers(before.stamp)) return;
  report(fmt::format("{}: '{}' on {} does not wait for '{}' on {}", kind, after.operation, place(after.stamp),
                     before.operation, place(before.stamp)));
}

}  // namespace phalanx::sim_device
