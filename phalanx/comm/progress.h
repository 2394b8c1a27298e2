// Progress: who drives an operation from issue to completion.
//
// A synchronous operation is driven by the thread that issued it, if the communicator has nothing else under way;
// otherwise, and for asynchronous ones, by the process's one progress thread, shared by all communicators (and by all
// rank threads). It goes round all operations that may move, never blocks in one, and sleeps on all their doorbells at
// once when none does. Collectives of one communicator run one after the other in issue order; point-to-point
// operations that follow each other run side by side. Stream-ordered operations are launched by the thread that issues
// them, as far as that goes without a peer, and watched by the progress thread, synchronous ones too: there "wait" is
// an order to the waiter's stream.
//
// The first error of a communicator aborts its backend: what is queued behind it, and what is issued later, fails too.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/flight_log.h"
#include "phalanx/comm/wait.h"

namespace phalanx {

/// One issued operation. `issued` is filled before it is driven; the rest belongs to whoever drives it.
class WorkState {
 public:
  struct Issued {
    OperationDescription description;
    std::shared_ptr<Backend> backend;
    std::shared_ptr<const std::string> group;  // the communicator's name
    std::chrono::milliseconds timeout{};
    std::shared_ptr<FlightLog> flight;
    std::uint64_t flight_number = 0;
    std::shared_ptr<void> buffers;  // kept until the operation is done
  };

  explicit WorkState(Issued issued)
      : issued_(std::move(issued)), oversubscribed_(issued_.backend->traits().oversubscribed) {}
  ~WorkState();
  WorkState(const WorkState&) = delete;
  WorkState& operator=(const WorkState&) = delete;

  /// Drives it to its end on this thread. Throws what wait() would.
  void run();
  /// Stream-ordered: starts it on this thread; the progress thread takes it from there. An error is wait()'s.
  void launch() noexcept;

  // For the progress thread.
  Progress advance() noexcept;  // starts it if need be; a failure is recorded, and done once no peer uses the buffers
  bool add_doorbells(std::vector<Doorbell>& bells);  // false: to be polled
  void watchdog_check() noexcept;                    // about every 100 ms while blocked: time-outs, dead peers
  bool is_p2p() const noexcept { return !issued_.description.transfers.empty(); }
  void release() noexcept;  // lets go of operation, buffers and backend: the communicator shall be who ends that
  void finish() noexcept;   // then makes is_done() true and wakes whoever waits

  void wait();  // throws the error, if any
  bool is_done() const noexcept {
    if (done_.load(std::memory_order_acquire) != 0) return true;
    return completion_ && !is_failing_.load(std::memory_order_acquire) && completion_->is_done();
  }

 private:
  void start_clock();
  void require_in_time();
  void fail(std::exception_ptr error) noexcept;
  bool retire() noexcept;
  [[noreturn]] void throw_error(const std::string& what) const;
  bool wait_on_stream();

  Issued issued_;
  const bool oversubscribed_;
  std::unique_ptr<Operation> operation_;
  std::shared_ptr<StreamCompletion> completion_;  // stream-ordered operations; set before anybody else sees this
  std::atomic<bool> is_failing_{false};           // error_ will be there when done_ is
  std::exception_ptr error_;
  std::chrono::steady_clock::time_point started_{};
  bool clock_runs_ = false;
  std::atomic<std::uint32_t> done_{0};  // a futex word
  std::atomic<std::uint32_t> sleepers_{0};
};

/// The operations of one communicator that the progress thread has in hand.
class OperationQueue {
 public:
  /// True if the thread that issues may drive an operation itself.
  bool is_empty() const noexcept { return pending_.load(std::memory_order_acquire) == 0; }
  /// Until is_done() is true of all that made the queue empty: a moment, in which they are over already.
  void await_finished() const noexcept {
    while (finishing_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  }

 private:
  friend class ProgressEngine;
  std::atomic<std::uint32_t> pending_{0};
  std::atomic<std::uint32_t> finishing_{0};            // counted as no longer pending, and not yet as done
  std::deque<std::shared_ptr<WorkState>> operations_;  // progress thread only
};

class ProgressEngine {
 public:
  /// The process's engine; made at first use, its thread joined when the last holder lets go.
  static std::shared_ptr<ProgressEngine> shared();
  ~ProgressEngine();

  void submit(const std::shared_ptr<OperationQueue>& queue, std::shared_ptr<WorkState> work);

 private:
  ProgressEngine();
  void run();
  bool take_new_work();
  bool advance_queue(OperationQueue& queue);
  std::size_t active_count(const OperationQueue& queue) const;

  std::mutex mutex_;
  std::vector<std::pair<std::shared_ptr<OperationQueue>, std::shared_ptr<WorkState>>> submitted_;
  std::atomic<std::uint32_t> wake_{0};  // a futex word: changed for new work and at the end
  std::atomic<std::uint32_t> wake_sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::shared_ptr<OperationQueue>> queues_;  // progress thread only
  std::thread thread_;
};

}  // namespace phalanx
