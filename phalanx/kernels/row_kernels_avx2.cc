#define PHALANX_ROW_KERNELS kRowKernelsAvx2
#define PHALANX_ISA "avx2"
#define PHALANX_LANES 8
#include "phalanx/kernels/row_kernels_body.h"
