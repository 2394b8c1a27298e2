// Casts of matrices to float8, scaled by their own largest values ("dynamic scaling"), for products of float8 numbers.
//
// A value is multiplied by scale = largest number of the type / amax, saturated, and rounded to nearest even. amax is
// the largest absolute value of what shares the scale: of the whole matrix (tensorwise), or of a row of a factor
// (rowwise). A product of two such factors is divided by both scales. float8 products want both factors with the summed
// dimension contiguous, so a matrix is cast as it is, transposed, or both. Under rowwise scaling the transposed one has
// other scales and so other numbers.
//
// - A matrix of zeros has a finite scale. An infinity makes all values that share its scale NaN, and a NaN stays one.
//   So what is not finite is not hidden by saturation.
// - Scales are computed in double and rounded to float. Under rowwise scaling they are rounded down to powers of two.
// - If a matrix is cut over ranks, amax is that of all parts: each part has the numbers of the whole.
//
//   const Float8Cast x8 = cast_to_float8(x, {.recipe = recipe, .transposed = true});
//   const at::Tensor y = float8_product(x8.plain, w8.plain, {.dtype = at::kBFloat16});     // x w^T
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace phalanx::kernels {

enum class Float8Recipe : std::uint8_t { tensorwise, rowwise };

/// The dimension of a matrix of which each rank holds a part.
enum class Float8Cut : std::uint8_t { none, rows, columns };

/// Replaces an int32 tensor by its maximum over ranks, in place. Collective, in stream order.
using MaxOverRanks = std::function<void(const at::Tensor& values)>;

/// A factor of a product, [m, k] with k contiguous. A product sums over k.
struct Float8Matrix {
  at::Tensor values;   // undefined: not made
  at::Tensor inverse;  // float32: what the values are multiplied by to get those before the cast; [1, 1] or [m, 1]
};

struct Float8Cast {
  Float8Matrix plain;       // [rows, columns]
  Float8Matrix transposed;  // [columns, rows], rows rounded up to a multiple of 16 with zeros
  at::Tensor amax;          // tensorwise: float32 [1, 1]
};

struct Float8CastOptions {
  Float8Recipe recipe = Float8Recipe::tensorwise;
  at::ScalarType to = at::kFloat8_e4m3fn;  // or at::kFloat8_e5m2
  bool plain = true;
  bool transposed = false;
  /// Values are rounded to this type first, if they are wider.
  at::ScalarType through = at::kFloat;
  Float8Cut cut = Float8Cut::none;
  const MaxOverRanks* max_over_ranks = nullptr;  // required if it is cut
  at::Tensor amax = {};                          // tensorwise: known already, of all ranks; undefined: not known
};

/// REQUIRES: contiguous, two-dimensional, not empty, both sizes known to fit (columns a multiple of 16). No autograd.
Float8Cast cast_to_float8(const at::Tensor& matrix, const Float8CastOptions& options);

struct Float8ProductOptions {
  at::ScalarType dtype = at::kBFloat16;  // of the result, if `out` is undefined
  at::Tensor out = {};                   // [m of a, m of b]: written
  bool fast_accum = false;               // sums in less than float32, where the device offers that
  bool emulate = false;                  // by float32 products, on any device
};

/// a b^T. On the CPU it is always emulated. No autograd.
at::Tensor float8_product(const Float8Matrix& a, const Float8Matrix& b, const Float8ProductOptions& options);

/// Why the device cannot compute the products of this recipe: libtorch's message. Empty: it can, or it is the CPU.
std::string float8_problem(at::Device device, Float8Recipe recipe);

}  // namespace phalanx::kernels
