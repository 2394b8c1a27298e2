// TaskThread: a thread that runs one function at a time, to avoid starting a new thread for each function.
//
//   TaskThread thread;
//   thread.start([] { work(); });     // must not throw; no other task may be running
//   thread.wait();
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "phalanx/base/start_thread.h"

namespace phalanx {

class TaskThread {
 public:
  TaskThread() : thread_(start_thread("work beside the main thread", [this] { run(); })) {}
  ~TaskThread() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  void start(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      task_ = std::move(task);
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !task_; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return task_ || stop_; });
      if (!task_) return;
      lock.unlock();
      task_();
      lock.lock();
      task_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace phalanx
