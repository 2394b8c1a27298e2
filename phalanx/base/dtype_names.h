// Common names of floating-point types, for every option and key that takes one.
//
//   canonical_dtype("bf16")   // "bfloat16"
//   canonical_dtype("half")   // "float16"
//   canonical_dtype("int3")   // "int3": unknown names stay as they are
#pragma once

#include <string>
#include <string_view>

namespace phalanx {

/// libtorch's name of a type: "float16" for fp16, f16 and half, "bfloat16" for bf16, "float32" for fp32, f32 and
/// float, "float64" for fp64, f64 and double. Each name may begin with "torch.". Any other text is returned unchanged.
std::string canonical_dtype(std::string_view name);

}  // namespace phalanx
