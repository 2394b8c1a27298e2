#include "phalanx/base/process_stats.h"

#include <sys/resource.h>
#include <unistd.h>

#include <charconv>
#include <ctime>
#include <string>
#include <string_view>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"

namespace phalanx {
namespace {

double clock_seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::uint64_t leading_number(std::string_view text) {
  const std::size_t digit = text.find_first_of("0123456789");
  std::uint64_t value = 0;
  if (digit != std::string_view::npos) std::from_chars(text.data() + digit, text.data() + text.size(), value);
  return value;
}

}  // namespace

std::uint64_t resident_bytes() {
  const std::string pages = read_file("/proc/self/statm");  // total resident shared ...
  return leading_number(std::string_view(pages).substr(pages.find(' '))) *
         static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

std::uint64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::uint64_t>(usage.ru_maxrss) * 1024;
}

std::uint64_t proportional_bytes() {
  try {
    const std::string rollup = read_file("/proc/self/smaps_rollup");
    const std::size_t line = rollup.find("\nPss:");
    if (line != std::string::npos) return leading_number(std::string_view(rollup).substr(line)) * 1024;
  } catch (const FileError&) {  // kernels before 4.14, and sandboxes, do not have it
  }
  return resident_bytes();
}

double process_cpu_seconds() { return clock_seconds(CLOCK_PROCESS_CPUTIME_ID); }
double thread_cpu_seconds() { return clock_seconds(CLOCK_THREAD_CPUTIME_ID); }

}  // namespace phalanx
