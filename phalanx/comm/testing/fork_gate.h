// Forks the ranks of a test, and holds each until all are there: none talks to a server of this process before the last
// fork (see quiet_fork.h).
//
//   ForkGate gate;
//   for (int rank = 0; rank < world; ++rank)
//     if (gate.fork() == 0) run(rank);  // does not return
//   gate.open();
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace phalanx {

class ForkGate {
 public:
  ForkGate();
  ~ForkGate();
  ForkGate(const ForkGate&) = delete;
  ForkGate& operator=(const ForkGate&) = delete;
  /// fork(). In the child it returns 0 once the gate is open; the child ends if this process has ended before.
  pid_t fork();
  void open();

 private:
  std::atomic<std::uint32_t>* is_open_;  // in shared memory; a futex word
};

}  // namespace phalanx
