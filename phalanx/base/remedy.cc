#include "phalanx/base/remedy.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "phalanx/base/start_thread.h"

namespace phalanx {
namespace {

std::string remedy_of(int error) {
  rlimit limit{};
  switch (error) {
    case EMFILE:
      if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return "raise RLIMIT_NOFILE (ulimit -n)";
      return fmt::format(
          "RLIMIT_NOFILE is {} files and connections of a process (ulimit -n): raise it, to 1024 or more",
          limit.rlim_cur);
    case ENFILE:
      return "the whole system has as many open files as it may (sysctl fs.file-max)";
    case ENOSPC:
      return "make room there, or choose another place";
    case EDQUOT:
      return "make room within your quota there, or choose another place";
    case EROFS:
      return "choose a place that can be written to";
    case ENOMEM: {
      const std::string limits = memory_limits_text();
      return limits.empty() ? "the machine or container has no more memory to give"
                            : limits + ": raise it, or use less memory";
    }
    default:
      return {};
  }
}

}  // namespace

std::string with_remedy(std::string message) {
  for (const int error : {EMFILE, ENFILE, ENOSPC, EDQUOT, EROFS, ENOMEM}) {
    const std::string_view words = std::strerror(error);
    const std::size_t at = message.find(words);
    if (at == std::string::npos) continue;
    const std::string remedy = remedy_of(error);
    // Add it only once: the error may come from another rank, which has added it already.
    if (message.find(remedy) != std::string::npos) return message;
    return fmt::format("{}; {}", message, remedy);
  }
  return message;
}

}  // namespace phalanx
