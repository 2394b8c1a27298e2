// What must stand in the environment before a process that computes starts: libgomp and glibc read it once, at exec.
//
//   OMP_NUM_THREADS          usable cores / local ranks, at least 1
//   OMP_WAIT_POLICY,         when a rank has several threads: idle ones sleep after a short spin. libgomp's default is
//   to GOMP_SPINCOUNT           spin for milliseconds, which makes it many times slower beside any other busy program
//   GLIBC_TUNABLES           glibc.malloc.hugetlb=1 is appended: malloc asks for huge pages, so large buffers that come
//                            and go cost a fraction of the page faults (glibc 2.35 and newer). And
//                            glibc.malloc.mmap_threshold and trim_threshold: up to 256 MiB of freed memory stay with
//                            the process for the next step, which would have to be cleared by the kernel once more
//
// A variable that the user has set is left alone; of GLIBC_TUNABLES only these tunables are ours.
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
