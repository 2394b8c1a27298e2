// WorkerGroup: the ranks of one node in one round, with their processes, output and reports. It does not know other
// nodes.
#pragma once

#include <poll.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/launch/supervisor/child_process.h"
#include "phalanx/launch/supervisor/rendezvous_messages.h"
#include "phalanx/launch/supervisor/stopped_ranks.h"
#include "phalanx/launch/supervisor/supervisor.h"
#include "phalanx/launch/supervisor/worker_failure.h"

namespace phalanx {

class WorkerGroup {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr Clock::time_point kNever = Clock::time_point::max();

  struct Context {
    const SupervisorOptions* options;
    ProcessGuard* guard;
    WorkerLogs* logs;
    sigset_t signal_mask;  // of the ranks
    std::string reports;   // this round's folder for reports
    std::string secret;
    std::vector<std::vector<int>> cpus;  // per local rank; empty: not bound
  };

  /// Starts the ranks of `assignment`. Throws UsageError if the program cannot be run.
  WorkerGroup(Context context, const Order& start, const NodeAssignment& assignment);
  ~WorkerGroup();  // kills the ranks that still run
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  void add_poll_fds(std::vector<pollfd>& fds);
  void pump(const std::vector<pollfd>& fds);  // the vector that add_poll_fds() filled
  Clock::time_point wake_at() const;

  /// Reaps the ranks that have ended and kills the ranks whose time to stop is over.
  void step(Clock::time_point now);
  bool any_alive() const;
  bool all_succeeded() const;
  /// Returns true once, after a rank has failed. It first gives other ranks a short time to report the cause of that
  /// error, or the same error.
  bool take_failure(Clock::time_point now);

  /// Sends SIGTERM now and SIGKILL after `grace`; a rank that is stopped (SIGSTOP) gets SIGKILL without the grace time.
  void terminate(std::chrono::milliseconds grace);
  /// Passes on a stop signal. `again`: it is the second one, so all ranks are killed.
  void stop(int signal, bool again);
  /// Passes on a signal that does not end the job. SIGQUIT goes only to processes that handle it. Returns how many
  /// received the signal.
  int pass_on(int signal) const;

  /// The failed ranks, without the ranks that ended only because this launcher ended them. May be called while ranks
  /// are alive.
  std::vector<WorkerFailure> failures() const;

 private:
  struct Rank {
    int rank = 0, local_rank = 0;
    pid_t pid = -1;
    bool alive = false;
    bool was_terminated = false;  // by this launcher, so its death is no failure
    int wait_status = 0;
    double ended_at_s = 0;
    Clock::time_point kill_at = kNever;
    std::optional<std::chrono::seconds> announced;  // the time that it announced for a graceful stop
    std::string report_directory, error_file;
    WorkerStream streams[2];
    std::optional<Clock::time_point> stopped_since;
    bool failed() const;
  };

  void start(int local_rank, const Order& order, const NodeAssignment& assignment);
  EnvironmentMap environment_of(const Rank& entry, const Order& order, const NodeAssignment& assignment) const;
  void reap(Rank& rank);
  void read_announcements(Clock::time_point now);
  bool any_ended() const;
  void detect_stopped_ranks(Clock::time_point now);
  void report_all_stopped(Clock::time_point now, bool has_slept);
  void kill_stopped_ranks(Clock::time_point now, bool has_slept);
  void kill_all();

  Context context_;
  std::string host_;
  const int cores_;  // cores that this process may use
  std::vector<Rank> ranks_;
  std::vector<OutputRelay*> polled_;
  std::size_t first_polled_ = 0;
  bool failure_taken_ = false;  // or failures no longer matter
  Clock::time_point failure_certain_at_ = kNever;
  bool stopping_ = false;                        // by a signal
  std::unique_ptr<StoppedRanks> stopped_ranks_;  // in a job of several nodes
  Clock::time_point announcements_heard_{}, stops_looked_for_{};
  std::optional<Clock::time_point> all_stopped_since_;
  bool all_stopped_said_ = false;
};

}  // namespace phalanx
