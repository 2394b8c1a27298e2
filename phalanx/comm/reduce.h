// Reductions over raw memory. The local and the shm backend share this kernel, so both give the same bits.
//
//   out[i] = in[0][i] op in[1][i] op ... op in[n-1][i]      for i in [0, count), in this order
//
// - f16 and bf16 are accumulated in float32 and rounded once, to nearest even, at the end. `avg` divides the sum by n
//   once, before that rounding. Integers wrap around. min and max give NaN if any input is NaN.
// - On bool, sum and max are logical or; product and min are logical and.
// - `out` may be one of the inputs. Partial overlaps are not allowed.
// - The result of an element depends only on that element's inputs. It does not depend on where a range starts or ends,
//   nor on the instruction set (baseline, AVX2, AVX-512; chosen once per process). Which of two NaNs is the result is
//   unspecified.
#pragma once

#include <cstddef>

#include "phalanx/comm/types.h"

namespace phalanx {

using ReduceKernel = void (*)(void* out, const void* const* inputs, int n, std::size_t count);

/// REQUIRES: reducible(dtype, op).
/// ENSURES: the result is not null.
ReduceKernel reduce_kernel(DataType dtype, ReduceOp op);

/// false for avg on i32, i64, u8 and bool.
bool reducible(DataType dtype, ReduceOp op);

/// f16 and bf16 to float32, and back, rounded once to nearest even. For sums that continue elsewhere in float32.
void widen_floats(DataType dtype, float* out, const void* in, std::size_t count);
void narrow_floats(DataType dtype, void* out, const float* in, std::size_t count);

namespace reduce_avx512 {
ReduceKernel kernel(DataType dtype, ReduceOp op);
void widen(DataType dtype, float* out, const void* in, std::size_t count);
void narrow(DataType dtype, void* out, const float* in, std::size_t count);
}  // namespace reduce_avx512
namespace reduce_avx2 {
ReduceKernel kernel(DataType dtype, ReduceOp op);
void widen(DataType dtype, float* out, const void* in, std::size_t count);
void narrow(DataType dtype, void* out, const float* in, std::size_t count);
}  // namespace reduce_avx2
namespace reduce_baseline {
ReduceKernel kernel(DataType dtype, ReduceOp op);
void widen(DataType dtype, float* out, const void* in, std::size_t count);
void narrow(DataType dtype, void* out, const float* in, std::size_t count);
}  // namespace reduce_baseline

}  // namespace phalanx
