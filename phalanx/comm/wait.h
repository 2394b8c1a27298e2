// How a thread waits for another: spin, then yield the core, then sleep in the kernel.
//
// Spinning reacts within tens of nanoseconds, but burns a core that the awaited rank may need. With more ranks than
// cores the spin must be short, or each wait lasts a scheduler quantum (milliseconds). The lengths are measured; see
// docs/communication_internals.md.
#pragma once

#include <chrono>
#include <cstdint>

namespace phalanx {

/// Cores this process may run on (affinity mask).
int available_cores();

/// Tells the core that this is a spin loop.
inline void spin_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// The first two stages, spin and yield. step() returns false when it is time to sleep.
class SpinBackoff {
 public:
  struct Lengths {
    std::uint32_t spins;
    std::uint32_t yields;
  };
  static constexpr Lengths kOwnCore{2000, 50};       // a waiter that has a core to itself
  static constexpr Lengths kOversubscribed{20, 50};  // more ranks than cores
  static constexpr Lengths kAsleep{20, 0};           // what is awaited takes longer than to wake up
  static constexpr Lengths kBackground{200, 4};      // the progress thread, beside a thread that computes

  explicit SpinBackoff(Lengths lengths) : lengths_(lengths) {}
  bool step();
  void reset() { steps_ = 0; }

 private:
  Lengths lengths_;
  std::uint32_t steps_ = 0;
};

}  // namespace phalanx
