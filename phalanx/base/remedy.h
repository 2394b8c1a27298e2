// Adds advice to messages that only name a system error: "Too many open files" says neither what the limit is nor how
// to raise it.
//
//   print(with_remedy("eventfd: Too many open files"));
//   // eventfd: Too many open files; RLIMIT_NOFILE is 16 files and connections of a process (ulimit -n): raise it, ...
#pragma once

#include <string>

namespace phalanx {

/// If the message contains the text of such an error, appends the limit that was reached and how to raise it, or where
/// to free space. Otherwise returns the message unchanged.
std::string with_remedy(std::string message);

}  // namespace phalanx
