#define PHALANX_ROW_KERNELS kRowKernelsBaseline
#define PHALANX_ISA "baseline"
#define PHALANX_LANES 4
#include "phalanx/kernels/row_kernels_body.h"
