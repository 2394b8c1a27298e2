// The parameters of a layout beside those of one rank: each rank compares the part that it has, copies included, and
// all learn where each parameter is furthest off.
//
// Rank 0 has the reference, and sends it one parameter at a time: whole, in float32, on the host. All calls are
// collective, and done when they return.
//
//   ParameterComparison parts(laid_out, rank == 0 ? &reference : nullptr, *world, fail);
//   for (const ParameterCheck& check : parts.compare(gradient_of)) ...                     // in the model's order
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/tensor/named.h"
#include "phalanx/verify/layout_check.h"

namespace phalanx::train {

/// What of a parameter is compared: its gradient, its weight. Undefined: zeros.
using ValueOf = std::function<at::Tensor(const NamedTensor&)>;
/// Of parameter `index`, of this rank's part: how far off it may be beside a tolerance, relative to the whole's norm.
using Explain =
    std::function<double(std::size_t index, const at::Tensor& found, const at::Tensor& expected, double norm)>;

class ParameterComparison {
 public:
  /// Both sides, and the world, must outlive it. `not_finite` throws; it is called on every rank with the name of a
  /// parameter whose value on one rank is not finite. Error where the layout has a parameter that one rank has not.
  ParameterComparison(LayoutSide& parallelized, LayoutSide* reference, Communicator& world,
                      std::function<void(const std::string& name)> not_finite);

  const std::vector<std::string>& names() const noexcept { return names_; }
  const std::vector<std::int64_t>& shape(std::size_t index) const { return shapes_[index]; }  // of the whole
  const NamedTensor* here(std::size_t index) const;  // this rank's part; null: another stage's

  /// Rank 0's whole value, on every rank; undefined on all where it has none.
  at::Tensor send(std::size_t index, const ValueOf& value) const;
  /// Of each parameter the rank that is furthest off.
  std::vector<ParameterCheck> compare(const ValueOf& value, const Explain& explain = nullptr) const;
  /// Held against parameters that are laid out alike, on each rank against its own.
  std::vector<ParameterCheck> compare_same_parts(const std::vector<NamedTensor>& others, const ValueOf& value) const;
  /// From here on both sides have the layout's weights, so that each step is compared by itself: how far two runs come
  /// apart over several steps is decided by the model and the learning rate, not by the layout.
  void take_weights_of_layout() const;

 private:
  void share_names();
  void find_own_parts();
  std::vector<ParameterCheck> worst_of_ranks(const std::vector<std::string>& mine) const;

  LayoutSide& parallelized_;
  LayoutSide* reference_;  // on rank 0
  Communicator& world_;
  std::function<void(const std::string&)> not_finite_;
  std::vector<std::string> names_;
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<NamedTensor> mine_;  // by index; without a name where there is none
  std::set<std::size_t> own_;      // those parts that this rank is the first to have
};

}  // namespace phalanx::train
