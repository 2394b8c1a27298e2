#include "phalanx/base/quick_exit.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>

namespace phalanx {

void skip_earlier_static_destructors() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // Handlers run in reverse order, so this one runs before those of libraries that were loaded before main().
  const auto leave = [](int status, void*) {
    std::cout.flush();
    std::clog.flush();
    std::fflush(nullptr);
    ::_exit(status);
  };
  ::on_exit(leave, nullptr);
#endif
}

}  // namespace phalanx
