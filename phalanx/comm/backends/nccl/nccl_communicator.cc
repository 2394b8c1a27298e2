#include "phalanx/comm/backends/nccl/nccl_communicator.h"

#include <fmt/format.h>

#include <atomic>

#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/comm/wait.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;

// How long a group that ends in order waits for NCCL to finish the work of the other ranks in it.
constexpr std::chrono::seconds kFinalizePatience{10};

// The pause between two polls of an unfinished NCCL call: most calls take microseconds, making a group takes seconds.
void nccl_nap(SpinBackoff& backoff) {
  if (!backoff.step()) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

}  // namespace

NcclConfig NcclCommunicator::config() const {
  NcclConfig config;
  config.blocking = 0;
  return config;
}

std::string NcclCommunicator::text_of(NcclResult result) const {
  std::string text = setup_.table->get_error_string(result);
  const char* last = comm_ != nullptr ? setup_.table->get_last_error(comm_) : nullptr;
  if (last != nullptr && *last != '\0') text += fmt::format(" ({})", last);
  return text;
}

void NcclCommunicator::throw_if_aborted(const char* what) const {
  if (is_aborted()) abort_.throw_if_set(fmt::format("NCCL: {}: ", what).c_str());
}

void NcclCommunicator::poll_until(const char* what, const std::function<void()>& give_up,
                                  const std::function<bool()>& is_done) const {
  const auto begin = Clock::now();
  SpinBackoff backoff(SpinBackoff::kBackground);
  while (!is_done()) {
    throw_if_aborted(what);
    if (give_up) give_up();
    if (Clock::now() - begin > setup_.timeout)
      throw CommError(
          fmt::format("NCCL: {} is not finished after {:.1f} s: a rank has not come, or NCCL cannot "
                      "connect (NCCL_DEBUG=INFO shows what it tries)",
                      what, std::chrono::duration<double>(setup_.timeout).count()));
    nccl_nap(backoff);
  }
}

// For calls that make a group: complete when the communicator's state is no longer in_progress.
void NcclCommunicator::await(const char* what, NcclResult first, NcclComm* comm,
                             const std::function<void()>& give_up) const {
  NcclResult state = first;
  poll_until(what, give_up, [&] {
    if (state != NcclResult::in_progress) return true;
    const NcclResult asked = setup_.table->comm_get_async_error(comm, &state);
    if (asked != NcclResult::success) state = asked;
    return state != NcclResult::in_progress;
  });
  if (state != NcclResult::success) throw CommError(fmt::format("NCCL: {}: {}", what, text_of(state)));
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::make(Setup setup, const NcclUniqueId& id, int size, int rank,
                                                         const std::function<void()>& give_up) {
  std::shared_ptr<NcclCommunicator> group(new NcclCommunicator(std::move(setup)));
  const auto device = group->setup_.streams->enter();
  NcclConfig config = group->config();
  const NcclResult result = group->setup_.table->comm_init_rank_config(&group->comm_, size, id, rank, &config);
  try {
    group->await("making the group", result, group->comm_, give_up);
  } catch (...) {
    group->abort("it could not be made");
    throw;
  }
  return group;
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::split(int color, int key, const std::function<void()>& give_up) {
  const std::lock_guard lock(call_mutex_);
  throw_if_aborted("split");
  const auto device = setup_.streams->enter();
  std::shared_ptr<NcclCommunicator> group(new NcclCommunicator(setup_));
  NcclConfig config = this->config();
  const NcclResult result = setup_.table->comm_split(comm_, color, key, &group->comm_, &config);
  // The old group's state shows when the call is complete. NCCL stores the new group's handle some time before or after
  // that, from a thread of its own. Then the new group's state shows when it is usable.
  try {
    await("split", result, comm_, give_up);
    if (color == kNcclNoColor) {
      no_groups_.push_back(std::move(group));  // NCCL may still store that there is none
      return nullptr;
    }
    poll_until("split", give_up, [&] {
      if (std::atomic_ref(group->comm_).load(std::memory_order_acquire) != nullptr) return true;
      await("split", NcclResult::in_progress, comm_, give_up);  // throws if it has failed since
      return false;
    });
  } catch (...) {
    // NCCL may still be working, and will store the communicator that it made.
    left_behind_ = std::move(group);
    abort("it could not be split");
    throw;
  }
  try {
    group->await("making the group by split", NcclResult::in_progress, group->comm_, give_up);
  } catch (...) {
    group->abort("it could not be made");
    throw;
  }
  return group;
}

// Only the aborter holds the lock for long.
std::unique_lock<std::mutex> NcclCommunicator::lock_for(const char* what) {
  for (;;) {
    throw_if_aborted(what);
    std::unique_lock lock(call_mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
      throw_if_aborted(what);
      return lock;
    }
    std::this_thread::yield();
  }
}

void NcclCommunicator::begin(const char* what, const std::function<NcclResult(NcclComm*)>& body) {
  const auto lock = lock_for(what);
  const auto device = setup_.streams->enter();
  last_call_ = what;
  last_result_ = body(comm_);
  if (last_result_ != NcclResult::success && last_result_ != NcclResult::in_progress)
    throw CommError(fmt::format("NCCL: {}: {}", what, text_of(last_result_)));
}

bool NcclCommunicator::is_enqueued() {
  const auto lock = lock_for(last_call_);
  if (last_result_ == NcclResult::success) return true;
  NcclResult state = NcclResult::success;
  if (setup_.table->comm_get_async_error(comm_, &state) == NcclResult::success && state == NcclResult::success)
    last_result_ = NcclResult::success;
  return last_result_ == NcclResult::success;
}

void NcclCommunicator::begin_group(const char* what, const std::function<NcclResult(NcclComm*)>& body) {
  begin(what, [&](NcclComm* comm) {
    NcclResult result = setup_.table->group_start();
    if (result != NcclResult::success) return result;
    result = body(comm);
    // Always ended: NCCL counts the starts of a thread.
    const NcclResult end = setup_.table->group_end();
    return result == NcclResult::success || result == NcclResult::in_progress ? end : result;
  });
}

std::string NcclCommunicator::async_error() {
  // A thread that makes a call checks the state itself.
  const std::unique_lock lock(call_mutex_, std::try_to_lock);
  if (!lock.owns_lock() || is_aborted()) return "";
  NcclResult state = NcclResult::success;
  const NcclResult asked = setup_.table->comm_get_async_error(comm_, &state);
  if (asked != NcclResult::success) state = asked;
  if (state == NcclResult::success || state == NcclResult::in_progress) return "";
  return text_of(state);
}

void NcclCommunicator::abort(const std::string& reason) noexcept {
  if (!abort_.set(reason)) return;
  try {
    aborter_ = start_thread("the end of a group of NCCL", [this] {
      const std::lock_guard in_no_call(call_mutex_);  // making and splitting see the flag and end
      if (comm_ != nullptr) {
        const auto device = setup_.streams->enter();
        setup_.table->comm_abort(comm_);  // frees it, whatever it returns
        comm_ = nullptr;
      }
      ended_.store(true, std::memory_order_release);
    });
  } catch (const std::exception&) {
    // No thread available: the communicator is left as it is; the process is about to end in errors anyway.
    ended_.store(true, std::memory_order_release);
  }
}

NcclCommunicator::~NcclCommunicator() {
  if (aborter_.joinable()) aborter_.join();
  if (left_behind_) left_behind_->abort("it could not be made");
  if (comm_ == nullptr) return;
  const auto device = setup_.streams->enter();
  NcclResult state = setup_.table->comm_finalize(comm_);
  SpinBackoff backoff(SpinBackoff::kBackground);
  for (const auto begin = Clock::now(); state == NcclResult::in_progress && Clock::now() - begin < kFinalizePatience;
       nccl_nap(backoff)) {
    const NcclResult asked = setup_.table->comm_get_async_error(comm_, &state);
    if (asked != NcclResult::success) state = asked;
  }
  if (state == NcclResult::success)
    setup_.table->comm_destroy(comm_);
  else
    setup_.table->comm_abort(comm_);
}

}  // namespace phalanx
