// Memory and processor time of this process, from the kernel. Linux only.
//
// Resident memory (RSS) counts pages that are shared with other ranks in full. PSS divides them by the number of
// processes that share them, so the PSS of all ranks adds up to the real use of the machine. Reading PSS walks the page
// tables and takes milliseconds: read it once per log line, not once per operation.
#pragma once

#include <cstdint>

namespace phalanx {

std::uint64_t resident_bytes();       // RSS now
std::uint64_t peak_resident_bytes();  // the highest RSS so far
std::uint64_t proportional_bytes();   // PSS now; RSS if the kernel does not report PSS
double process_cpu_seconds();         // user and system time of all threads
double thread_cpu_seconds();          // of the calling thread

}  // namespace phalanx
