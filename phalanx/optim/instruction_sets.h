// PHALANX_INSTRUCTION_SETS in front of a function compiles it once for each of several instruction sets. The loader
// picks the widest that the CPU supports. For plain loops whose results do not depend on that choice.
#pragma once

// Excluded under sanitizers: their runtimes are not initialised yet when the loader picks.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define PHALANX_INSTRUCTION_SETS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PHALANX_INSTRUCTION_SETS
#endif
