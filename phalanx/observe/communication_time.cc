#include "phalanx/observe/communication_time.h"

#include <algorithm>
#include <utility>

namespace phalanx::observe {
namespace {

constexpr double kSecondsPerMicrosecond = 1e-6;

/// The length of the union of the intervals.
std::int64_t covered(std::vector<std::pair<std::int64_t, std::int64_t>> intervals) {
  std::ranges::sort(intervals);
  std::int64_t total = 0, until = 0;
  for (const auto& [begin, end] : intervals) {
    if (end <= until || end <= begin) continue;  // the system clock may have been set back
    total += end - std::max(begin, until);
    until = end;
  }
  return total;
}

}  // namespace

CommunicationTime& CommunicationTime::operator+=(const CommunicationTime& other) {
  busy_seconds += other.busy_seconds;
  waited_seconds += other.waited_seconds;
  operations += other.operations;
  lost += other.lost;
  return *this;
}

CommunicationTimer::CommunicationTimer(Groups groups) : groups_(std::move(groups)) {
  for (const auto& entries : groups_()) next_.push_back(entries.empty() ? 0 : entries.back().seq + 1);
}

CommunicationTime CommunicationTimer::take() {
  CommunicationTime time;
  std::vector<std::pair<std::int64_t, std::int64_t>> busy, waited;
  const auto groups = groups_();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const FlightEntry& entry : groups[g]) {
      if (entry.seq < next_[g]) continue;
      if (entry.ended_us == 0) break;  // the entries after it are checked again too
      time.lost += static_cast<std::int64_t>(entry.seq - next_[g]);
      next_[g] = entry.seq + 1;
      ++time.operations;
      if (entry.started_us != 0) busy.emplace_back(entry.started_us, entry.ended_us);
      if (entry.wait_until_us != 0) waited.emplace_back(entry.wait_from_us, entry.wait_until_us);
    }
  }
  // Waiting for an operation that is still queued also counts as communication.
  busy.insert(busy.end(), waited.begin(), waited.end());
  time.busy_seconds = kSecondsPerMicrosecond * static_cast<double>(covered(std::move(busy)));
  time.waited_seconds = kSecondsPerMicrosecond * static_cast<double>(covered(std::move(waited)));
  return time;
}

}  // namespace phalanx::observe
