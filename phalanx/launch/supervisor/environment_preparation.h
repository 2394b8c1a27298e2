// Environment variables that must be set before a compute process starts: libgomp and glibc read them once, at exec.
//
//   OMP_NUM_THREADS          usable cores / local ranks, at least 1
//   OMP_WAIT_POLICY,         set if a rank has several threads: idle threads sleep after a short spin. By default
//   GOMP_SPINCOUNT           libgomp spins for milliseconds, which is many times slower beside any other busy program
//   GLIBC_TUNABLES           glibc.malloc.hugetlb=1 is appended. malloc then asks for huge pages, so large short-lived
//                            buffers cost a fraction of the page faults (glibc 2.35 and newer).
//                            glibc.malloc.mmap_threshold and trim_threshold are appended too. Up to 256 MiB of freed
//                            memory then stay with the process for the next step; otherwise the kernel would have to
//                            clear them again
//
// A variable that the user has set is left alone. Of GLIBC_TUNABLES only these tunables are added.
#pragma once

#include <map>
#include <string>

#include "phalanx/base/cpu.h"

namespace phalanx {

using EnvironmentMap = std::map<std::string, std::string>;

/// This process's environment.
EnvironmentMap current_environment();

void prepare_environment(EnvironmentMap& environment, int local_ranks, int cores = usable_cores());

}  // namespace phalanx
