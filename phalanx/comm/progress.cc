#include "phalanx/comm/progress.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>

#include <algorithm>
#include <utility>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/comm/futex.h"
#include "phalanx/comm/signature.h"

namespace phalanx {
namespace {

constexpr auto kWatchdogInterval = std::chrono::milliseconds(100);

}  // namespace

WorkState::~WorkState() = default;

void WorkState::throw_error(const std::string& what) const {
  throw CommError(fmt::format("{}, op {} of group '{}', rank {} of {}: {}", describe(issued_.description),
                              issued_.description.sequence, *issued_.group, issued_.backend->rank(),
                              issued_.backend->size(), what));
}

void WorkState::start_clock() {
  if (clock_runs_) return;
  clock_runs_ = true;
  started_ = std::chrono::steady_clock::now();
}

void WorkState::require_in_time() {
  const auto waited = std::chrono::steady_clock::now() - started_;
  if (waited < issued_.timeout) return;
  const std::vector<int> missing = operation_->missing_ranks();
  std::string who = missing.empty()
                        ? std::string("a peer")
                        : fmt::format("rank{} {}", missing.size() == 1 ? "" : "s", fmt::join(missing, ", "));
  throw CommError(
      fmt::format("timed out after {:.1f} s; not arrived: {}", std::chrono::duration<double>(waited).count(), who));
}

// Adds the operation to the backend's error text, and makes the whole group fail.
void WorkState::fail(std::exception_ptr error) noexcept {
  std::string reason = "unknown error";
  try {
    try {
      std::rethrow_exception(std::move(error));
    } catch (const CommError& inner) {
      throw_error(inner.what());
    }
  } catch (const std::exception& wrapped) {
    error_ = std::current_exception();
    reason = wrapped.what();
  } catch (...) {
    error_ = std::current_exception();
  }
  is_failing_.store(true, std::memory_order_release);  // before the abort lets waiting streams go on
  issued_.backend->abort(reason);
  issued_.flight->failed(issued_.flight_number, reason);
}

bool WorkState::retire() noexcept { return !operation_ || operation_->retire(); }

void WorkState::run() {
  const auto begin = std::chrono::system_clock::now();
  try {
    issued_.flight->started(issued_.flight_number);
    operation_ = issued_.backend->start(issued_.description);
    SpinBackoff backoff(spin_lengths(SpinBackoff::kOwnCore));
    auto looked = std::chrono::steady_clock::time_point{};
    std::vector<Doorbell> bells;
    for (;;) {
      const Progress progress = operation_->advance();
      if (progress == Progress::done) break;
      if (progress == Progress::moved) {
        backoff.reset();
        clock_runs_ = false;
        continue;
      }
      if (backoff.step()) continue;
      if (!clock_runs_) {
        start_clock();
        looked = started_;
      }
      const auto limit = std::min<std::chrono::nanoseconds>(kWatchdogInterval, issued_.timeout);
      bells.clear();
      if (!operation_->add_doorbells(bells)) bells.clear();
      doorbell_wait(bells, limit);
      backoff.reset();
      const auto now = std::chrono::steady_clock::now();
      if (now - looked < limit) continue;
      looked = now;
      if (operation_->advance() == Progress::done) break;
      operation_->check_peers();
      require_in_time();
    }
    issued_.flight->finished(issued_.flight_number);
    issued_.flight->waited(issued_.flight_number, begin);
  } catch (...) {
    fail(std::current_exception());
    while (!retire()) std::this_thread::yield();
  }
  release();
  done_.store(1, std::memory_order_release);
  if (error_) std::rethrow_exception(error_);
}

void WorkState::launch() noexcept {
  try {
    issued_.flight->started(issued_.flight_number);
    operation_ = issued_.backend->start(issued_.description);
    completion_ = operation_->completion();
    operation_->launch();
  } catch (...) {
    fail(std::current_exception());
  }
}

Progress WorkState::advance() noexcept {
  if (error_) return retire() ? Progress::done : Progress::blocked;
  try {
    if (!operation_) {
      start_clock();
      issued_.flight->started(issued_.flight_number);
      operation_ = issued_.backend->start(issued_.description);
    }
    if (completion_) start_clock();
    const Progress progress = operation_->advance();
    if (progress == Progress::moved) clock_runs_ = false;
    if (progress == Progress::done) record_end();
    return progress;
  } catch (...) {
    fail(std::current_exception());
    return retire() ? Progress::done : Progress::blocked;
  }
}

void WorkState::record_end() {
  std::optional<observe::DeviceTimes> times;
  try {
    if (completion_) times = completion_->times();
  } catch (const CommError&) {  // the operation has ended well: a device that has failed since shows in the next one
  }
  times ? issued_.flight->finished(issued_.flight_number, *times) : issued_.flight->finished(issued_.flight_number);
}

bool WorkState::add_doorbells(std::vector<Doorbell>& bells) {
  // A failed operation is polled: it only waits for a moment.
  return operation_ && !error_ && operation_->add_doorbells(bells);
}

void WorkState::watchdog_check() noexcept {
  if (!operation_ || error_) return;
  try {
    start_clock();
    operation_->check_peers();
    require_in_time();
  } catch (...) {
    fail(std::current_exception());
  }
}

std::shared_ptr<void> WorkState::take_buffers() noexcept {
  return has_buffers_.exchange(false, std::memory_order_acq_rel) ? std::move(issued_.buffers) : nullptr;
}

void WorkState::release() noexcept {
  operation_.reset();
  take_buffers();
  issued_.backend.reset();
}

void WorkState::finish() noexcept {
  PHALANX_ASSERT(!operation_ && done_.load(std::memory_order_relaxed) == 0,
                 "an operation is released, then finished once");
  done_.store(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake_all(&done_, false);
}

// True once the current stream waits, or need not wait. False if the operation is failing: then the host must wait.
bool WorkState::wait_on_stream() {
  SpinBackoff backoff(SpinBackoff::kBackground);
  while (done_.load(std::memory_order_acquire) == 0 && !is_failing_.load(std::memory_order_acquire)) {
    const StreamCompletion::Joined joined = completion_->join_current_stream();
    if (joined != StreamCompletion::Joined::not_yet) {
      if (is_failing_.load(std::memory_order_acquire)) return false;
      if (joined == StreamCompletion::Joined::issuing_stream && issued_.buffers_are_in_stream_order) take_buffers();
      return true;
    }
    if (backoff.step()) continue;
    const Doorbell bell{&done_, 0, &sleepers_, false};
    doorbell_wait({&bell, 1}, std::chrono::microseconds(100));  // a launch changes no word
  }
  return false;
}

void WorkState::wait() {
  if (completion_ && wait_on_stream()) return;
  const auto is_over = [this] { return done_.load(std::memory_order_acquire) != 0; };
  if (!is_over()) {
    const auto begin = std::chrono::system_clock::now();
    SpinBackoff backoff(spin_lengths(SpinBackoff::kBackground));
    while (!is_over()) {
      if (backoff.step()) continue;
      const Doorbell bell{&done_, 0, &sleepers_, false};
      doorbell_wait({&bell, 1}, kWatchdogInterval);
    }
    issued_.flight->waited(issued_.flight_number, begin);
  }
  if (error_) std::rethrow_exception(error_);
}

std::shared_ptr<ProgressEngine> ProgressEngine::shared() {
  static std::mutex mutex;
  static std::weak_ptr<ProgressEngine> current;
  const std::lock_guard lock(mutex);
  std::shared_ptr<ProgressEngine> engine = current.lock();
  if (!engine || !engine->owner_.is_this_process()) {
    engine.reset(new ProgressEngine);
    current = engine;
  }
  return engine;
}

ProgressEngine::ProgressEngine() : thread_(start_thread("the progress of communicators", [this] { run(); })) {}

ProgressEngine::~ProgressEngine() {
  stopping_.store(true, std::memory_order_release);
  ring(wake_, wake_sleepers_, false);
  thread_.join();
}

void ProgressEngine::submit(const std::shared_ptr<OperationQueue>& queue, std::shared_ptr<WorkState> work) {
  queue->pending_.fetch_add(1, std::memory_order_acq_rel);
  {
    const std::lock_guard lock(mutex_);
    submitted_.emplace_back(queue, std::move(work));
  }
  ring(wake_, wake_sleepers_, false);
}

bool ProgressEngine::take_new_work() {
  decltype(submitted_) arrived;
  {
    const std::lock_guard lock(mutex_);
    arrived.swap(submitted_);
  }
  for (auto& [queue, work] : arrived) {
    if (queue->operations_.empty()) queues_.push_back(queue);
    queue->operations_.push_back(std::move(work));
  }
  return !arrived.empty();
}

// How many operations, from the front, may be in flight at once.
std::size_t ProgressEngine::active_count(const OperationQueue& queue) const {
  std::size_t count = 0;
  while (count < queue.operations_.size() && queue.operations_[count]->is_p2p()) ++count;
  return std::max<std::size_t>(count, 1);
}

bool ProgressEngine::advance_queue(OperationQueue& queue) {
  bool moved = false;
  std::size_t active = active_count(queue);
  for (std::size_t i = 0; i < active;) {
    const Progress progress = queue.operations_[i]->advance();
    moved |= progress != Progress::blocked;
    if (progress != Progress::done) {
      ++i;
      continue;
    }
    const std::shared_ptr<WorkState> work = std::move(queue.operations_[i]);
    queue.operations_.erase(queue.operations_.begin() + static_cast<std::ptrdiff_t>(i));
    --active;
    work->release();
    // From now on the issuing thread may drive an operation of this communicator itself.
    queue.finishing_.fetch_add(1, std::memory_order_relaxed);
    [[maybe_unused]] const auto pending = queue.pending_.fetch_sub(1, std::memory_order_acq_rel);
    PHALANX_ASSERT(pending > 0, "every operation in a queue is counted as pending");
    work->finish();
    queue.finishing_.fetch_sub(1, std::memory_order_release);
  }
  return moved;
}

void ProgressEngine::run() {
  pthread_setname_np(pthread_self(), "phalanx-comm");
  SpinBackoff backoff(SpinBackoff::kBackground);
  std::vector<Doorbell> bells;
  std::chrono::steady_clock::time_point looked = std::chrono::steady_clock::now();
  for (;;) {
    const std::uint32_t wake_seen = wake_.load(std::memory_order_seq_cst);
    bool moved = take_new_work();
    if (queues_.empty() && stopping_.load(std::memory_order_acquire)) return;
    for (const auto& queue : queues_) moved |= advance_queue(*queue);
    std::erase_if(queues_, [](const auto& queue) { return queue->operations_.empty(); });
    if (moved) {
      backoff.reset();
      continue;
    }
    if (!queues_.empty() && backoff.step()) continue;
    backoff.reset();

    bells.assign(1, {&wake_, wake_seen, &wake_sleepers_, false});
    bool must_poll = false;
    for (const auto& queue : queues_) {
      for (std::size_t i = 0; i < active_count(*queue); ++i) {
        if (!queue->operations_[i]->add_doorbells(bells)) must_poll = true;
      }
    }
    doorbell_wait(bells, must_poll ? std::chrono::nanoseconds(std::chrono::microseconds(200)) : kWatchdogInterval);
    const auto now = std::chrono::steady_clock::now();
    if (now - looked < kWatchdogInterval) continue;
    looked = now;
    for (const auto& queue : queues_)
      for (std::size_t i = 0; i < active_count(*queue); ++i) queue->operations_[i]->watchdog_check();
  }
}

}  // namespace phalanx
