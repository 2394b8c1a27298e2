#include "phalanx/comm/reduce.h"

#ifdef PHALANX_REDUCE_X86
#include <cpuid.h>
#endif

#include <cstdint>

namespace phalanx {
namespace {

enum class InstructionSet : std::uint8_t { baseline, avx2, avx512 };

#ifdef PHALANX_REDUCE_X86
// __builtin_cpu_supports("f16c") is not in clang 14.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

InstructionSet detect_instruction_set() {
#ifdef PHALANX_REDUCE_X86
  // What reduce_avx2.cc is compiled with. Every CPU with avx2 (x86-64-v3) has the others, too; checked all the same.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && has_f16c()) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      return InstructionSet::avx512;
    return InstructionSet::avx2;
  }
#endif
  return InstructionSet::baseline;
}

InstructionSet reduce_isa() {
  static const InstructionSet isa = detect_instruction_set();
  return isa;
}

}  // namespace

ReduceKernel reduce_kernel(DataType dtype, ReduceOp op) {
#ifdef PHALANX_REDUCE_X86
  if (reduce_isa() == InstructionSet::avx512) return reduce_avx512::kernel(dtype, op);
  if (reduce_isa() == InstructionSet::avx2) return reduce_avx2::kernel(dtype, op);
#endif
  return reduce_baseline::kernel(dtype, op);
}

void widen_floats(DataType dtype, float* out, const void* in, std::size_t count) {
#ifdef PHALANX_REDUCE_X86
  if (reduce_isa() == InstructionSet::avx512) return reduce_avx512::widen(dtype, out, in, count);
  if (reduce_isa() == InstructionSet::avx2) return reduce_avx2::widen(dtype, out, in, count);
#endif
  reduce_baseline::widen(dtype, out, in, count);
}

void narrow_floats(DataType dtype, void* out, const float* in, std::size_t count) {
#ifdef PHALANX_REDUCE_X86
  if (reduce_isa() == InstructionSet::avx512) return reduce_avx512::narrow(dtype, out, in, count);
  if (reduce_isa() == InstructionSet::avx2) return reduce_avx2::narrow(dtype, out, in, count);
#endif
  reduce_baseline::narrow(dtype, out, in, count);
}

bool reducible(DataType dtype, ReduceOp op) {
  if (op != ReduceOp::avg) return true;
  return dtype == DataType::f32 || dtype == DataType::f64 || dtype == DataType::f16 || dtype == DataType::bf16;
}

}  // namespace phalanx
