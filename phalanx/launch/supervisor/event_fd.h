// An eventfd: one thread uses it to wake another thread that polls.
//
//   const UniqueFd wake = new_event_fd();
#pragma once

#include <fmt/format.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/base/unique_fd.h"

namespace phalanx {

/// Close-on-exec and non-blocking. Throws Error if the process may open no more files.
inline UniqueFd new_event_fd() {
  UniqueFd fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw Error(fmt::format("eventfd: {}", std::strerror(errno)));
  return fd;
}

}  // namespace phalanx
