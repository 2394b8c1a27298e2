// Stochastic rounding to bfloat16: up or down at random, so that the mean over many roundings is the exact value. State
// of 16 bits then follows changes that are smaller than half of the distance between its numbers.
//
// The direction is a pure function of (seed, step, name, index in the global tensor). So every layout rounds alike, and
// a resumed run goes on alike. A value that bfloat16 has is never changed;
// an infinity stays one, and a NaN stays a NaN.
//
//   const RoundingKey key = rounding_key(stream_key(seed, "layers.0.attention.wq.weight"), /*step=*/7);
//   round_stochastically(key, first, values.size(), values.data(), rounded.data());
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace phalanx {

struct RoundingKey {
  std::uint32_t before = 0, between = 0;  // what an element's index is mixed with
};

/// `stream`: as stream_key() makes it of a seed and a name (tensor/counter_fill.h).
RoundingKey rounding_key(std::uint64_t stream, std::uint64_t step);

/// to[i] = from[i], an element of index first + i, in bfloat16. Torch-free.
void round_stochastically(RoundingKey key, std::uint64_t first, std::size_t count, const float* from,
                          std::uint16_t* to);

/// The same bits for a float32 tensor on any device, by libtorch's operators, in bfloat16. `indices`: int64 [count] on
/// the device, of the elements in the order of values.flatten(). `step`: a 0-dim tensor there.
at::Tensor round_stochastically(std::uint64_t stream, const at::Tensor& step, const at::Tensor& indices,
                                const at::Tensor& values);

}  // namespace phalanx
