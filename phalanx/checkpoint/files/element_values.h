// Decodes and encodes the elements in a file, without torch: to compare tensors and to convert their dtype.
//
// Conversions round to nearest even and give the same bits as torch: float64 is converted to 16 bits by way of float32,
// overflow becomes infinity, NaN a quiet NaN.
#pragma once

#include <cstddef>
#include <span>

#include "phalanx/checkpoint/files/safetensors.h"

namespace phalanx {

bool is_floating_point(safetensors::Dtype dtype);  // includes float8, but not complex numbers

/// Fills `values` (one for each element, two for a complex one) from the elements' bytes. Exact, except for 64-bit
/// integers beyond 2^53.
void decode_elements(safetensors::Dtype dtype, std::span<const std::byte> bytes, std::span<double> values);

/// The dtypes that encode_elements() writes: F64, F32, F16, BF16.
bool can_encode(safetensors::Dtype dtype);
void encode_elements(safetensors::Dtype dtype, std::span<const double> values, std::span<std::byte> bytes);

}  // namespace phalanx
