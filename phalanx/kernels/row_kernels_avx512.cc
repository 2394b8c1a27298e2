#define PHALANX_ROW_KERNELS kRowKernelsAvx512
#define PHALANX_ISA "avx512"
#define PHALANX_LANES 16
#include "phalanx/kernels/row_kernels_body.h"
