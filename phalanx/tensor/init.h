// Init: a parameter's initial values, and functions that fill a tensor, or one shard of it, with them.
//
// A value is a pure function of (seed, global name, index in the flat global tensor). So the layout does not matter: a
// rank that holds elements [begin, begin + n) of a parameter fills only those and gets the bits of the whole.
//
//   fill(weight, Init::normal(0.0, 0.02), seed, "layers.0.attention.wq.weight");
//   fill(shard, Init::normal(0.0, 0.02), seed, "layers.0.attention.wq.weight", /*begin=*/rank * shard.numel());
//   fill_shard(shard, Init::normal(0.0, 0.02), seed, spec, mesh.rank());   // whatever box the rank holds
//
// Values are computed in fp32 and rounded to the tensor's dtype. Any device and any strides ("flat" is row-major).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "phalanx/tensor/shard_spec.h"

namespace phalanx {

struct Init {
  enum class Kind : std::uint8_t { constant, uniform, normal };
  Kind kind = Kind::constant;
  double a = 0.0;  // constant: the value; uniform: low; normal: mean
  double b = 0.0;  // uniform: high; normal: standard deviation

  static Init constant(double value) { return {Kind::constant, value, 0.0}; }
  static Init uniform(double low, double high) { return {Kind::uniform, low, high}; }
  static Init normal(double mean, double std) { return {Kind::normal, mean, std}; }
};

/// Fills `tensor` with elements [begin, begin + tensor.numel()) of the global parameter `name`.
void fill(const at::Tensor& tensor, const Init& init, std::uint64_t seed, std::string_view name,
          std::int64_t begin = 0);

/// Fills `local` with the given box of the global parameter `name`, whose shape is `shape`. Throws Error if the box has
/// another shape than `local`.
void fill_box(const at::Tensor& local, const Init& init, std::uint64_t seed, std::string_view name, const Box& box,
              const std::vector<std::int64_t>& shape);

/// Fills `local` with the part of the parameter that the rank of the spec's mesh holds. Throws Error if that part has
/// another shape. Throws ConfigError for a partial spec: it does not determine the addends of an initial value.
void fill_shard(const at::Tensor& local, const Init& init, std::uint64_t seed, const ShardSpec& spec, int rank);

}  // namespace phalanx
