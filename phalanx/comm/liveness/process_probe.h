// ProcessProbe: observes the ranks' processes, as far as they run on this node: alive, dead or stopped.
//
// It looks from outside, through /proc, and has no thread. So a rank that computes for hours, or gets no CPU time, is
// never taken for a stopped one. "Stopped" means SIGSTOP, SIGTSTP or a terminal's job control (state T). A process that
// a debugger holds (state t) counts as running. A zombie is dead. Torch-free, thread-safe.
//
//   const std::string mine = ProcessProbe::identity();               // exchanged through a store
//   ProcessProbe probe(all_identities, std::chrono::seconds(5));
//   if (auto why = probe.failure_reason(2); !why.empty())            // "has died (process 4711)"
//     throw CommError("rank 2 " + why);
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace phalanx {

class ProcessProbe {
 public:
  /// identities[r]: the result of identity() in rank r's process; empty: unknown. A stopped rank becomes a failure
  /// shortly before `heartbeat` has passed; never if that is zero.
  ProcessProbe(const std::vector<std::string>& identities, std::chrono::milliseconds heartbeat);

  /// Identifies this process and its network namespace. Only processes of the same kernel and PID namespace can use it.
  /// Throws CommError without /proc.
  static std::string identity();
  /// The same for another process of this PID namespace; empty if there is no such process.
  static std::string identity_of(int pid);

  /// True if the rank's state can be observed here. False for another node or container, and if /proc hides it.
  bool can_see(int rank) const;
  /// True if the rank is in this process's network namespace. If not, even a healthy rank may be unreachable. False for
  /// another kernel's process.
  bool shares_network(int rank) const;
  /// Empty while the process lives and runs, or has been stopped for less than the limit. Call it about every 100 ms
  /// while waiting for the rank: time in which it is not called does not count.
  std::string failure_reason(int rank);
  bool is_dead(int rank) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Process {
    int pid = 0;
    std::uint64_t start_time = 0;
    bool is_self = false;
    bool is_visible = false;  // its state and its end can be observed; false for this process
    bool shares_network = false;
    Clock::time_point stopped_since{}, looked_at{};  // of a process seen stopped
  };
  static char state_of(const Process& process);

  const std::chrono::milliseconds heartbeat_;
  std::mutex mutex_;  // for the times
  std::vector<Process> processes_;
};

inline constexpr std::chrono::milliseconds kDefaultHeartbeat{5'000};

/// The limit: `chosen`, else $PHALANX_COMM_HEARTBEAT_SECONDS, else the default. 0: no limit.
std::chrono::milliseconds heartbeat_limit(std::optional<std::chrono::milliseconds> chosen);

inline constexpr std::chrono::milliseconds kFastestTick{100};

/// How long an awaited rank may be silent before that is an error, if the observer looks once a tick: so much less than
/// the limit that the error comes within it, but at least half of it.
std::chrono::milliseconds heartbeat_timeout(std::chrono::milliseconds limit,
                                            std::chrono::milliseconds tick = kFastestTick);

}  // namespace phalanx
