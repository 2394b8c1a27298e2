// What to do about an error of the system's, for messages that only name it: "Too many open files" says neither how
// many there may be nor how to have more.
//
//   print(with_remedy("eventfd: Too many open files"));
//   // eventfd: Too many open files; RLIMIT_NOFILE is 16 files and connections of a process (ulimit -n): raise it, ...
#pragma once

#include <string>

namespace phalanx {

/// The message, with the limit that was met and how to raise it, or where to make room, if it has the words of
/// such an error.
std::string with_remedy(std::string message);

}  // namespace phalanx
