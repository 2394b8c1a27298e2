// OwnerProcess: the process that made an object. A forked child has a copy of the object, but not its threads, and it
// shares the object's connections and eventfds. So the child must neither use it nor end anything of it.
//
//   class Server {
//     ~Server() {
//       if (owner_.is_this_process()) stop_thread();
//     }
//     OwnerProcess owner_;
//   };
#pragma once

#include <cstdint>

namespace phalanx {

class OwnerProcess {
 public:
  /// This process. Throws Error if the system has no memory to observe forks.
  OwnerProcess();
  /// False in a child that was forked later, and in its children. Needs no system call.
  bool is_this_process() const noexcept;

 private:
  std::uint64_t forks_;
};

}  // namespace phalanx
