// StreamQueue: the work of one stream, and the thread that does it in order.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace phalanx::sim_device {

class StreamQueue {
 public:
  /// `prepare_thread` runs first in the thread, if it is set.
  explicit StreamQueue(std::function<void()> prepare_thread);
  /// Finishes all work.
  ~StreamQueue();
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  /// REQUIRES: `work` does not throw.
  void put(std::function<void()> work);
  bool is_idle() const;

 private:
  void run(const std::function<void()>& prepare_thread);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool is_busy_ = false;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace phalanx::sim_device
