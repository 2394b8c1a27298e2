#include "phalanx/kernels/row_kernels.h"

namespace phalanx::kernels {

extern const RowKernels kRowKernelsBaseline;
#ifdef PHALANX_X86_KERNELS
extern const RowKernels kRowKernelsAvx2, kRowKernelsAvx512;
#endif

AvailableRowKernels available_row_kernels() {
  AvailableRowKernels result = {{&kRowKernelsBaseline}};
#ifdef PHALANX_X86_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    result.tables[1] = &kRowKernelsAvx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw")) {
      result.tables[2] = &kRowKernelsAvx512;
    }
  }
#endif
  return result;
}

const RowKernels& row_kernels() {
  static const RowKernels& fastest = []() -> const RowKernels& {
    const AvailableRowKernels available = available_row_kernels();
    const RowKernels* best = available.tables[0];
    for (const RowKernels* table : available.tables) best = table != nullptr ? table : best;
    return *best;
  }();
  return fastest;
}

}  // namespace phalanx::kernels
