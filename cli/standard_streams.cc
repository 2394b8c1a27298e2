#include "cli/standard_streams.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "cli/command.h"

namespace phalanx::cli {

void open_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) < 0 && errno == EBADF) {
      static_cast<void>(::open("/dev/null", stream == STDIN_FILENO ? O_RDONLY : O_WRONLY));  // takes the lowest number
    }
  }
}

int status_after_output(std::string_view name, int status) {
  errno = 0;
  const bool is_written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (is_written || status != 0) return status;
  print_error(name, fmt::format("cannot write to standard output{}{}", errno != 0 ? ": " : "",
                                errno != 0 ? std::strerror(errno) : ""));
  return 1;
}

}  // namespace phalanx::cli
