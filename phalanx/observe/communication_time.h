// How long a rank was communicating, and for how much of that time its thread only waited, from its flight recorders.
//
//   CommunicationTimer timer([&] { return std::vector<std::vector<FlightEntry>>{world->recent_operations()}; });
//   run_step();
//   const CommunicationTime time = timer.take();       // the operations that ended since the last call
//   exposed = time.waited_seconds / step_seconds;      // the rest of busy_seconds overlapped with other work
//
// Torch-free. Each call costs one copy of the recorders (0.1 ms with 2,048 operations).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "phalanx/observe/flight_recorder.h"

namespace phalanx::observe {

struct CommunicationTime {
  double busy_seconds = 0;    // at least one operation of any group was running, on a device there, or waited for
  double waited_seconds = 0;  // the rank's thread waited for an operation, or, on a device, one of its streams
  std::int64_t operations = 0;
  std::int64_t lost = 0;  // operations that were overwritten in their recorder before take(); not in the times

  CommunicationTime& operator+=(const CommunicationTime& other);
};

class CommunicationTimer {
 public:
  /// Returns the operations of each group, the oldest first. It always returns the same groups in the same order.
  using Groups = std::function<std::vector<std::vector<FlightEntry>>()>;
  /// Counts from now on.
  explicit CommunicationTimer(Groups groups);

  /// The time since the last call. An operation that has not ended yet is counted by a later call.
  CommunicationTime take();

 private:
  Groups groups_;
  std::vector<std::uint64_t> next_;  // for each group: the first operation that was not counted yet
};

}  // namespace phalanx::observe
