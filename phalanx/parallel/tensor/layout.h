// ActivationLayout: how an activation lies over the ranks of a tensor-parallel group, in the forward pass and, by its
// nature, in the backward pass. convert() goes from one to the other.
//
//   layout        values                             gradients
//   replicated()  every rank has the same            every rank has the same
//   shared()      every rank has the same            addends: each rank does something else with it
//   partial()     addends, whose sum is meant        every rank has the same
//   split(dim)    equal parts along a dimension      equal parts
//
// PyTorch's DTensor knows replicated as Replicate, partial as Partial, split(d) as Shard(d); shared is a Replicate
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
// All else is refused by check_conversion().
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
  int dim = 0;  // of split; negative: from the last

  static ActivationLayout replicated() { return {Kind::replicated, 0}; }
  static ActivationLayout shared() { return {Kind::shared, 0}; }
  static ActivationLayout partial() { return {Kind::partial, 0}; }
  static ActivationLayout split(int dim) { return {Kind::split, dim}; }
  std::string text() const;  // replicated, shared, partial, split(1)
  bool operator==(const ActivationLayout&) const = default;
};

/// ConfigError that begins with `what` unless there is such a conversion.
void check_conversion(const std::string& what, const ActivationLayout& from, const ActivationLayout& to);

/// Collective unless both are the same or the group is one rank. Error where the ranks do not divide the dimension.
/// `overlap_queue` (to shared): as in functional_collectives.h.
at::Tensor convert(const at::Tensor& x, const ActivationLayout& from, const ActivationLayout& to,
                   const std::shared_ptr<Communicator>& group,
                   const std::shared_ptr<WeightGradientQueue>& overlap_queue = nullptr);

}  // namespace phalanx
