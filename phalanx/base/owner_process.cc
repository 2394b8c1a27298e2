#include "phalanx/base/owner_process.h"

#include <pthread.h>

#include <atomic>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

std::atomic<std::uint64_t> forks_so_far{0};  // that led to this process

}  // namespace

OwnerProcess::OwnerProcess() : forks_(forks_so_far.load(std::memory_order_relaxed)) {
  static const int observed =
      pthread_atfork(nullptr, nullptr, [] { forks_so_far.fetch_add(1, std::memory_order_relaxed); });
  if (observed != 0) throw Error("cannot observe forks of this process: no memory");
}

bool OwnerProcess::is_this_process() const noexcept { return forks_ == forks_so_far.load(std::memory_order_relaxed); }

}  // namespace phalanx
