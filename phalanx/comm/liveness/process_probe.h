// ProcessProbe: the processes that play the ranks, as far as they run on this machine: alive, dead or stopped.
//
// Seen from outside, through pidfds and /proc, so a rank that computes for hours or gets no processor is never taken
// for a stopped one. Stopped is what SIGSTOP, SIGTSTP and a terminal's job control do (state T); a process that a
// debugger holds (state t) counts as running. A zombie is dead. Torch-free, thread-safe.
//
//   const std::string mine = ProcessProbe::identity();               // exchanged through a store
//   ProcessProbe peers(all_identities, std::chrono::seconds(5));
//   if (auto why = peers.failure_reason(2); !why.empty()) ...                // "has died (process 4711)"
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
  /// identities[r]: what identity() said in rank r's process; empty: not known. A rank that is stopped becomes trouble
  /// a little before heartbeat is over; never, if that is zero.
  ProcessProbe(const std::vector<std::string>& identities, std::chrono::milliseconds heartbeat);
  ~ProcessProbe();
  ProcessProbe(const ProcessProbe&) = delete;
  ProcessProbe& operator=(const ProcessProbe&) = delete;

  /// This process, in words that only processes of the same kernel and PID namespace can use, and its network
  /// namespace. Throws CommError without a /proc.
  static std::string identity();
  /// The same of another process of this PID namespace; empty if there is none of that number.
  static std::string identity_of(int pid);

  /// Whether the rank's state can be told here. Not of another machine or container, nor where /proc hides it.
  bool can_see(int rank) const;
  /// Whether the rank has this process's network: if not, a rank that is well may still be out of reach. Of another
  /// kernel's: false.
  bool shares_network(int rank) const;
  /// Empty while it lives and runs, or has been stopped for less than the limit. To be asked every 100 ms or so while
  /// it is waited for: the time it was not asked does not count.
  std::string failure_reason(int rank);
  bool is_dead(int rank) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Process {
    int pid = 0;
    std::uint64_t start_time = 0;
    int pidfd = -1;
    bool is_self = false;
    bool is_visible = false;   // its end can be seen
    bool can_be_read = false;  // its state, too
    bool shares_network = false;
    Clock::time_point stopped_since{}, looked_at{};  // of a process seen stopped
  };
  std::string why_stopped(Process& process);

  const std::chrono::milliseconds heartbeat_;
  std::mutex mutex_;  // for the times
  std::vector<Process> processes_;
};

inline constexpr std::chrono::milliseconds kDefaultHeartbeat{5'000};

/// The limit: what was chosen, else $PHALANX_COMM_HEARTBEAT_SECONDS, else the default. 0: none.
std::chrono::milliseconds heartbeat_limit(std::optional<std::chrono::milliseconds> chosen);

/// How long a rank that is waited for may be silent before that is an error: a little less than the limit, so that the
/// error comes within it.
std::chrono::milliseconds heartbeat_timeout(std::chrono::milliseconds limit);

}  // namespace phalanx
