#include "phalanx/comm/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <ctime>

namespace phalanx {
namespace {

#ifndef SYS_futex_waitv
constexpr long kFutexWaitvCall = 449;
#else
constexpr long kFutexWaitvCall = SYS_futex_waitv;
#endif
constexpr std::size_t kMaxWaiters = 128;
constexpr auto kPollInterval = std::chrono::microseconds(200);

// struct futex_waitv of linux/futex.h, which older headers lack.
struct FutexWaiter {
  std::uint64_t value;
  std::uint64_t address;
  std::uint32_t flags;
  std::uint32_t reserved;
};
constexpr std::uint32_t kFutexSize32 = 2;

timespec to_timespec(std::chrono::nanoseconds time) {
  return {static_cast<time_t>(time.count() / 1'000'000'000), static_cast<long>(time.count() % 1'000'000'000)};
}

// False if the kernel has no such call.
bool futex_wait_any(std::span<const Doorbell> doorbells, std::chrono::nanoseconds limit) {
  static std::atomic<bool> unsupported{false};
  if (unsupported.load(std::memory_order_relaxed)) return false;
  std::array<FutexWaiter, kMaxWaiters> waiters{};
  const std::size_t count = std::min(doorbells.size(), kMaxWaiters);
  for (std::size_t i = 0; i < count; ++i) {
    waiters[i] = {doorbells[i].seen, reinterpret_cast<std::uint64_t>(doorbells[i].word),
                  kFutexSize32 | (doorbells[i].process_shared ? 0U : static_cast<std::uint32_t>(FUTEX_PRIVATE_FLAG)),
                  0};
  }
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const timespec until = to_timespec(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec) + limit);
  const long status = syscall(kFutexWaitvCall, waiters.data(), count, 0, &until, CLOCK_MONOTONIC);
  if (status < 0 && (errno == ENOSYS || errno == EPERM)) {
    unsupported.store(true, std::memory_order_relaxed);
    return false;
  }
  return true;
}

}  // namespace

void futex_wait(const std::atomic<std::uint32_t>* word, std::uint32_t seen, std::chrono::nanoseconds limit,
                bool process_shared) {
  const timespec relative = to_timespec(limit);
  syscall(SYS_futex, word, process_shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, &relative, nullptr, 0);
}

void futex_wake_all(const std::atomic<std::uint32_t>* word, bool process_shared) {
  syscall(SYS_futex, word, process_shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void doorbell_wait(std::span<const Doorbell> doorbells, std::chrono::nanoseconds limit) {
  if (doorbells.empty()) {
    const timespec nap = to_timespec(std::min<std::chrono::nanoseconds>(limit, kPollInterval));
    nanosleep(&nap, nullptr);
    return;
  }
  for (const Doorbell& bell : doorbells)
    if (bell.sleepers) bell.sleepers->fetch_add(1, std::memory_order_seq_cst);
  if (doorbells.size() == 1) {
    futex_wait(doorbells[0].word, doorbells[0].seen, limit, doorbells[0].process_shared);
  } else if (!futex_wait_any(doorbells, limit)) {
    futex_wait(doorbells[0].word, doorbells[0].seen, std::min<std::chrono::nanoseconds>(limit, kPollInterval),
               doorbells[0].process_shared);
  }
  for (const Doorbell& bell : doorbells)
    if (bell.sleepers) bell.sleepers->fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace phalanx
