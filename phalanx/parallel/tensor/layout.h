// ActivationLayout: how an activation is laid out over the ranks of a tensor-parallel group, in the forward pass and,
// by implication, in the backward pass. convert() changes one layout to another.
//
//   layout        values                             gradients
//   replicated()  every rank has the same            every rank has the same
//   shared()      every rank has the same            addends: each rank does something different with it
//   partial()     addends; the value is their sum    every rank has the same
//   split(dim)    equal parts along a dimension      equal parts
//
// In PyTorch's DTensor, replicated is Replicate, partial is Partial and split(d) is Shard(d). shared is a Replicate
// whose gradient is Partial.
//
//   from -> to                   forward          backward         where
//   replicated -> shared         nothing          all-reduce       in front of a column-parallel layer
//   partial    -> replicated     all-reduce       nothing          behind a row-parallel one
//   split(d)   -> shared         all-gather       reduce-scatter   the same two under sequence parallelism
//   partial    -> split(d)       reduce-scatter   all-gather
//   split(d)   -> replicated     all-gather       own part
//   replicated -> split(d)       own part         all-gather
//   partial    -> shared         all-reduce       all-reduce
// check_conversion() refuses all others.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace phalanx {

class Communicator;
class WeightGradientQueue;

struct ActivationLayout {
  enum class Kind : std::uint8_t { replicated, shared, partial, split };
  Kind kind = Kind::replicated;
  int dim = 0;  // of split; negative: counted from the last

  static ActivationLayout replicated() { return {Kind::replicated, 0}; }
  static ActivationLayout shared() { return {Kind::shared, 0}; }
  static ActivationLayout partial() { return {Kind::partial, 0}; }
  static ActivationLayout split(int dim) { return {Kind::split, dim}; }
  std::string text() const;  // replicated, shared, partial, split(1)
  bool operator==(const ActivationLayout&) const = default;
};

/// Throws a ConfigError that begins with `what` if that conversion does not exist.
void check_conversion(const std::string& what, const ActivationLayout& from, const ActivationLayout& to);

/// Collective, unless the layouts are equal or the group has one rank. Throws Error if the number of ranks does not
/// divide the dimension. `overlap_queue` (to shared): see functional_collectives.h.
at::Tensor convert(const at::Tensor& x, const ActivationLayout& from, const ActivationLayout& to,
                   const std::shared_ptr<Communicator>& group,
                   const std::shared_ptr<WeightGradientQueue>& overlap_queue = nullptr);

}  // namespace phalanx
