// PHALANX_INSTRUCTION_SETS before a function: it is compiled once for each of several instruction sets, and the loader
// picks the widest that the CPU has. For plain loops whose results do not depend on that choice.
#pragma once

// Sanitizer runtimes are not up when the loader picks, hence the exclusion.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define PHALANX_INSTRUCTION_SETS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PHALANX_INSTRUCTION_SETS
#endif
