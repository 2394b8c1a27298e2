// Progress: drives operations from issue to completion.
//
// - A synchronous operation is driven by the thread that issued it, if the communicator has nothing else in flight.
// - All other operations are driven by the process's single progress thread. All communicators (and all rank threads)
//   share it. It visits every operation that may advance and never blocks in one. When none advances, it sleeps on all
//   their doorbells at once.
// - Collectives of one communicator run one after the other, in issue order. Consecutive point-to-point operations run
//   concurrently.
// - Stream-ordered operations, synchronous ones included, are launched by the issuing thread, as far as that is
//   possible without a peer. The progress thread then watches them. For these, wait() makes the waiter's stream wait.
//
// The first error of a communicator aborts its backend: everything queued behind it, and everything issued later,
// fails, too.
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

#include "phalanx/base/owner_process.h"
#include "phalanx/comm/backend.h"
#include "phalanx/comm/flight_log.h"
#include "phalanx/comm/wait.h"

namespace phalanx {

/// One issued operation. `issued` is filled before the operation is driven. Everything else belongs to its driver.
class WorkState {
 public:
  struct Issued {
    OperationDescription description;
    std::shared_ptr<Backend> backend;
    std::shared_ptr<const std::string> group;  // the communicator's name
    std::chrono::milliseconds timeout{};
    std::shared_ptr<FlightLog> flight;
    std::uint64_t flight_number = 0;
    std::shared_ptr<void> buffers;  // held until the operation is done
    // Their memory is used again in the order of the stream that issued the operation: so they are held only until that
    // stream waits for the operation.
    bool buffers_are_in_stream_order = false;
  };

  explicit WorkState(Issued issued)
      : issued_(std::move(issued)),
        sleeps_(issued_.backend->traits().sleeps),
        oversubscribed_(issued_.backend->traits().oversubscribed) {}
  ~WorkState();
  WorkState(const WorkState&) = delete;
  WorkState& operator=(const WorkState&) = delete;

  /// Drives the operation to its end on this thread. Throws what wait() would throw.
  void run();
  /// Stream-ordered: starts the operation on this thread; the progress thread continues it. wait() throws any error.
  void launch() noexcept;

  // For the progress thread.
  Progress advance() noexcept;  // starts it if needed; records a failure, then is done once no peer uses the buffers
  bool add_doorbells(std::vector<Doorbell>& bells);  // false: the thread must poll
  void watchdog_check() noexcept;                    // about every 100 ms while blocked: time-outs, dead peers
  bool is_p2p() const noexcept { return !issued_.description.transfers.empty(); }
  void release() noexcept;  // drops operation, buffers and backend, so that the communicator destroys the backend
  void finish() noexcept;   // afterwards: makes is_done() true and wakes the waiters

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
  std::shared_ptr<void> take_buffers() noexcept;  // the first call has them
  void record_end();
  SpinBackoff::Lengths spin_lengths(SpinBackoff::Lengths usual) const {
    return sleeps_ ? SpinBackoff::kAsleep : oversubscribed_ ? SpinBackoff::kOversubscribed : usual;
  }

  Issued issued_;
  const bool sleeps_, oversubscribed_;
  std::unique_ptr<Operation> operation_;
  std::shared_ptr<StreamCompletion> completion_;  // stream-ordered operations; set before another thread sees this
  std::atomic<bool> is_failing_{false};           // error_ will be set before done_ is
  std::atomic<bool> has_buffers_{true};
  std::exception_ptr error_;
  std::chrono::steady_clock::time_point started_{};
  bool clock_runs_ = false;
  std::atomic<std::uint32_t> done_{0};  // a futex word
  std::atomic<std::uint32_t> sleepers_{0};
};

/// The operations of one communicator that the progress thread drives.
class OperationQueue {
 public:
  /// True if the issuing thread may drive an operation itself.
  bool is_empty() const noexcept { return pending_.load(std::memory_order_acquire) == 0; }
  /// REQUIRES: is_empty() is true. Waits until is_done() is true for all operations that have left the queue. They are
  /// complete already, so the wait is short.
  void await_finished() const noexcept {
    while (finishing_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  }

 private:
  friend class ProgressEngine;
  std::atomic<std::uint32_t> pending_{0};
  std::atomic<std::uint32_t> finishing_{0};            // no longer counted as pending, not yet marked done
  std::deque<std::shared_ptr<WorkState>> operations_;  // progress thread only
};

class ProgressEngine {
 public:
  /// The process's engine, made at first use; a forked child makes its own. Its thread is joined when the last owner
  /// releases it.
  static std::shared_ptr<ProgressEngine> shared();
  ~ProgressEngine();

  void submit(const std::shared_ptr<OperationQueue>& queue, std::shared_ptr<WorkState> work);

 private:
  ProgressEngine();
  void run();
  bool take_new_work();
  bool advance_queue(OperationQueue& queue);
  std::size_t active_count(const OperationQueue& queue) const;

  OwnerProcess owner_;
  std::mutex mutex_;
  std::vector<std::pair<std::shared_ptr<OperationQueue>, std::shared_ptr<WorkState>>> submitted_;
  std::atomic<std::uint32_t> wake_{0};  // a futex word: changed when work arrives and at the end
  std::atomic<std::uint32_t> wake_sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::shared_ptr<OperationQueue>> queues_;  // progress thread only
  std::thread thread_;
};

}  // namespace phalanx
