#include "phalanx/comm/testing/fork_gate.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <new>
#include <system_error>

#include "phalanx/base/testing/quiet_fork.h"
#include "phalanx/comm/futex.h"

namespace phalanx {

using Word = std::atomic<std::uint32_t>;

ForkGate::ForkGate() {
  void* const page = mmap(nullptr, sizeof(Word), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "ForkGate: mmap");
  is_open_ = new (page) Word(0);
}

ForkGate::~ForkGate() { munmap(is_open_, sizeof(Word)); }

pid_t ForkGate::fork() {
  const pid_t parent = getpid();
  const pid_t child = quiet_fork();
  while (child == 0 && is_open_->load() == 0) {
    if (getppid() != parent) _exit(1);
    futex_wait(is_open_, 0, std::chrono::seconds(1), true);
  }
  return child;
}

void ForkGate::open() {
  is_open_->store(1);
  futex_wake_all(is_open_, true);
}

}  // namespace phalanx
