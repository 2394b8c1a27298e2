// Memory and processor time of this process, as the kernel accounts them. Linux only.
//
// Resident memory (RSS) counts pages shared with other ranks in full; PSS divides them by the number of processes that
// share them, so the PSS of all ranks add up to what the machine really uses. Reading PSS walks the page tables and
// takes milliseconds: ask for it once a log line, not once an operation.
#pragma once

#include <cstdint>

namespace phalanx {

std::uint64_t resident_bytes();       // RSS now
std::uint64_t peak_resident_bytes();  // the highest RSS so far
std::uint64_t proportional_bytes();   // PSS now; RSS where the kernel does not tell it
double process_cpu_seconds();         // user and system time of all threads
double thread_cpu_seconds();          // of the calling thread

}  // namespace phalanx
