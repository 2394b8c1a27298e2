// The reduction kernels for one instruction set; see reduce.h and the compile flags in CMakeLists.txt.
#define PHALANX_REDUCE_ISA reduce_baseline
#include "phalanx/comm/reduce_kernels.inc"
#undef PHALANX_REDUCE_ISA
