#define PHALANX_ROW_KERNELS kRowKernelsBaseline
#define PHALANX_ISA "baseline"
#include "phalanx/kernels/row_kernels_body.h"
