#include "phalanx/comm/wait.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace phalanx {

int available_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

bool SpinBackoff::step() {
  if (steps_ < lengths_.spins) {
    ++steps_;
    spin_pause();
    return true;
  }
  if (steps_ < lengths_.spins + lengths_.yields) {
    ++steps_;
    sched_yield();
    return true;
  }
  return false;
}

}  // namespace phalanx
