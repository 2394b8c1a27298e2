// VectorClock: what one party (a stream, the host) knows to be done, as a count for each stream.
//
// Each access of a stream gets a Stamp. A party that waits for an event joins the event's clock. An access whose stamp
// the clock covers is done before anything that the party starts later.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace phalanx::sim_device {

struct Stamp {
  int stream = -1;  // -1: before everything
  std::uint64_t count = 0;
};

class VectorClock {
 public:
  bool covers(Stamp stamp) const { return stamp.stream < 0 || of(stamp.stream) >= stamp.count; }
  std::uint64_t of(int stream) const {
    return static_cast<std::size_t>(stream) < counts_.size() ? counts_[static_cast<std::size_t>(stream)] : 0;
  }
  void join(const VectorClock& other) {
    counts_.resize(std::max(counts_.size(), other.counts_.size()));
    for (std::size_t i = 0; i < other.counts_.size(); ++i) counts_[i] = std::max(counts_[i], other.counts_[i]);
  }
  /// The next stamp of that stream.
  Stamp advance(int stream) {
    const auto index = static_cast<std::size_t>(stream);
    counts_.resize(std::max(counts_.size(), index + 1));
    return {stream, ++counts_[index]};
  }

 private:
  std::vector<std::uint64_t> counts_;
};

}  // namespace phalanx::sim_device
