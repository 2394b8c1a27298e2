#include "phalanx/launch/supervisor/environment_preparation.h"

#include <gnu/libc-version.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

extern char** environ;

namespace phalanx {
namespace {

bool is_set_in(const EnvironmentMap& environment, const std::string& name) {
  const auto found = environment.find(name);
  return found != environment.end() && !found->second.empty();
}

bool malloc_knows_huge_pages() {
  int major = 0, minor = 0;
  return std::sscanf(gnu_get_libc_version(), "%d.%d", &major, &minor) == 2 &&
         (major > 2 || (major == 2 && minor >= 35));
}

}  // namespace

EnvironmentMap current_environment() {
  EnvironmentMap result;
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (const char* equals = std::strchr(*entry, '='))
      result[std::string(*entry, static_cast<std::size_t>(equals - *entry))] = equals + 1;
  return result;
}

void prepare_environment(EnvironmentMap& environment, int local_ranks, int cores) {
  if (!is_set_in(environment, "OMP_NUM_THREADS"))
    environment["OMP_NUM_THREADS"] = std::to_string(std::max(1, cores / std::max(1, local_ranks)));
  if (environment["OMP_NUM_THREADS"] != "1" && !is_set_in(environment, "OMP_WAIT_POLICY")) {
    environment["OMP_WAIT_POLICY"] = "passive";
    // About 20 microseconds: long enough to bridge two operators, short enough to free the core for others.
    if (!is_set_in(environment, "GOMP_SPINCOUNT")) environment["GOMP_SPINCOUNT"] = "1000";
  }
  auto& tunables = environment["GLIBC_TUNABLES"];
  const auto add = [&](const std::string& name, const char* value) {
    if (tunables.find(name) != std::string::npos) return;
    if (!tunables.empty()) tunables += ':';
    tunables += name + '=' + value;
  };
  if (malloc_knows_huge_pages()) add("glibc.malloc.hugetlb", "1");
  // If one of the two is set, malloc no longer adjusts either of them.
  if (tunables.find("glibc.malloc.mmap_threshold") == std::string::npos &&
      tunables.find("glibc.malloc.trim_threshold") == std::string::npos) {
    add("glibc.malloc.mmap_threshold", "33554432");   // 32 MiB, the maximum
    add("glibc.malloc.trim_threshold", "268435456");  // 256 MiB
  }
  if (tunables.empty()) environment.erase("GLIBC_TUNABLES");
}

}  // namespace phalanx
