// Random numbers that are a pure function of (key, element index): the core of layout-independent initialisation.
//
// Element i of a stream needs no other element, so any range [begin, end) of a large tensor is filled by whoever holds
// it and equals that slice of the whole bit for bit. The generator is Philox4x32-10 with the element index / 4 as its
// counter; normals come from Box-Muller with polynomials of our own in plain IEEE arithmetic, so the bits depend
// neither on the C library nor on the instruction set.
//
//   std::vector<float> shard(end - begin);
//   fill_normal(stream_key(seed, "layers.0.attention.wq.weight"), begin, shard, 0.0f, 0.02f);
//
// Knows no tensor; see init.h for that.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace phalanx {

/// The Philox key of the stream that belongs to this seed and global name.
std::uint64_t stream_key(std::uint64_t seed, std::string_view name);

/// out[i] = value of element begin + i; uniform in [low, high). Normals reach 5.9 standard deviations.
void fill_uniform(std::uint64_t key, std::uint64_t begin, std::span<float> out, float low, float high);
void fill_normal(std::uint64_t key, std::uint64_t begin, std::span<float> out, float mean, float std);

}  // namespace phalanx
