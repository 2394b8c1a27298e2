// Finds the differences between two checkpoints, tensor by tensor. The memory it needs does not grow with them.
//
//   SavedState a("x/step-1"), b("y/step-1");
//   const auto difference = compare_states(a, b);
//   if (!difference.is_none()) report(difference);
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "phalanx/checkpoint/files/saved_state.h"

namespace phalanx {

/// A tensor that is in both and whose bits differ. If the shapes differ too, the values are not compared.
struct TensorDifference {
  const SavedTensor* a = nullptr;
  const SavedTensor* b = nullptr;
  std::int64_t elements = 0;             // that differ in value; if the dtypes are equal: in their bits
  double largest = 0;                    // max |a - b|; infinite if only one of the two is NaN or infinite
  std::vector<std::int64_t> largest_at;  // its first position

  bool same_shape() const { return a->shape == b->shape; }
  bool same_dtype() const { return a->dtype == b->dtype; }
};

struct StateDifference {
  std::vector<const SavedTensor*> only_in_a, only_in_b;
  std::vector<TensorDifference> tensors;
  std::vector<std::string> integers;  // "step: 100 and 200", "seed: 1 and missing"
  std::size_t compared = 0;           // tensors that are in both

  bool is_none() const { return only_in_a.empty() && only_in_b.empty() && tensors.empty() && integers.empty(); }
};

/// Reads every element of both and verifies it. `progress` gets the number of elements of `a` just compared.
StateDifference compare_states(
    SavedState& a, SavedState& b, const std::function<void(std::uint64_t)>& progress = [](std::uint64_t) {});

}  // namespace phalanx
