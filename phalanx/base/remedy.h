// What to do about an error of the system's, for messages that only name it: "Too many open files" says neither how
// many there may be nor how to have more.
//
//   print(with_remedy(error.what()));   // "eventfd: Too many open files: RLIMIT_NOFILE is 16 files (ulimit -n): raise
//   it"
#pragma once

#include <string>

namespace phalanx {

/// The message, with the limit that was met and how to raise it, or where to make room, if it ends with the words of
/// such an error or has them before a colon or bracket. The standard library's way to name a path is put into ours.
std::string with_remedy(std::string message);

}  // namespace phalanx
