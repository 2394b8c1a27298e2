#include "phalanx/testing/sim_device/stream_queue.h"

#include <utility>

#include "phalanx/base/start_thread.h"

namespace phalanx::sim_device {

StreamQueue::StreamQueue(std::function<void()> prepare_thread)
    : thread_(start_thread("a stream of a simulated device",
                           [this, prepare = std::move(prepare_thread)] { run(prepare); })) {}

StreamQueue::~StreamQueue() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void StreamQueue::put(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  if (queue_.size() == 1 && !is_busy_) changed_.notify_one();
}

bool StreamQueue::is_idle() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !is_busy_;
}

void StreamQueue::run(const std::function<void()>& prepare_thread) {
  if (prepare_thread) prepare_thread();
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ends_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    is_busy_ = true;
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    is_busy_ = false;
  }
}

}  // namespace phalanx::sim_device
