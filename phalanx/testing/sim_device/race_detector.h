// RaceDetector: finds accesses of two streams to the same bytes, at least one of them a write, that no event orders.
//
// It looks at the order that the program asked for (VectorClock), never at time. So it finds a missing wait even
// when the two operations happen to run in the right order. For each byte it keeps the last write, and each
// stream's last read since then.
//
//   detector.access({p, 64, /*is_write=*/true}, clock.advance(stream), clock, "aten::add_");
//   detector.reports();   // "write after read: 'aten::add_' on sim:0 stream 3 does not wait for 'aten::mul' on ..."
//
// Not thread-safe: the runtime holds its lock.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "phalanx/testing/sim_device/vector_clock.h"

namespace phalanx::sim_device {

struct Access {
  const void* begin = nullptr;
  std::size_t bytes = 0;
  bool is_write = false;
};

class RaceDetector {
 public:
  /// The next stream gets this name in reports.
  void name_stream(std::string name) { stream_names_.push_back(std::move(name)); }
  /// `clock` is the accessing stream's own.
  /// REQUIRES: `operation` lives as long as this object.
  void access(const Access& access, Stamp stamp, const VectorClock& clock, const char* operation);
  /// The range is known to be unused: what comes next races with nothing before.
  void forget(const void* begin, std::size_t bytes);
  /// Adds a report that somebody else found. Equal reports count once.
  void report(std::string text);
  std::string place(Stamp stamp) const;  // "sim:0 stream 3"

  const std::vector<std::string>& reports() const { return reports_; }
  void clear_reports();

 private:
  struct Mark {
    Stamp stamp;
    const char* operation = "";
  };
  struct Range {
    const std::byte* end = nullptr;
    Mark write;
    std::vector<Mark> reads;
  };
  using Ranges = std::map<const std::byte*, Range>;

  void split_at(const std::byte* address);
  void read(const std::byte* begin, const std::byte* end, const Mark& mark, const VectorClock& clock);
  void write(const std::byte* begin, const std::byte* end, const Mark& mark, const VectorClock& clock);
  void require_order(const char* kind, const Mark& before, const Mark& after, const VectorClock& clock);

  std::vector<std::string> stream_names_;
  Ranges ranges_;
  std::set<std::string> seen_;
  std::vector<std::string> reports_;
};

}  // namespace phalanx::sim_device
