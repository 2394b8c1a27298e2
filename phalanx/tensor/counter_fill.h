// Random numbers that are a pure function of (key, element index): the basis of layout-independent initialisation.
//
// Element i of a stream does not depend on any other element. So the rank that holds a range [begin, end) of a large
// tensor can fill it alone, and gets that slice of the whole bit for bit. The generator is Philox4x32-10 with the
// element index / 4 as its counter. Normals use Box-Muller with our own polynomials in plain IEEE arithmetic, so the
// bits depend neither on the C library nor on the instruction set.
//
//   std::vector<float> shard(end - begin);
//   fill_normal(stream_key(seed, "layers.0.attention.wq.weight"), begin, shard, 0.0f, 0.02f);
//
// Torch-free; see init.h for tensors.
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
