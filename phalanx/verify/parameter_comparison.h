// Compares the parameters of a layout with those of one rank. Each rank compares the part it has, copies included. Then
// all ranks learn where each parameter differs most.
//
// Rank 0 has the reference and sends it one parameter at a time: full, in float32, on the host. All calls are
// collective and synchronous.
//
//   ParameterComparison comparison(parallelized, rank == 0 ? &reference : nullptr, *world, fail);
//   for (const ParameterCheck& check : comparison.compare(gradient_of)) report(check);     // in the model's order
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

namespace phalanx::verify {

/// Selects what is compared of a parameter: its gradient, its weight. Undefined: zeros.
using ValueOf = std::function<at::Tensor(const NamedTensor&)>;
/// For this rank's part of parameter `index`: how far it may differ beyond the tolerance, relative to the full norm.
using Explain = std::function<double(std::size_t index, double norm)>;

class ParameterComparison {
 public:
  /// REQUIRES: both sides and the world outlive this object; `not_finite` throws. `not_finite` is called on every rank
  /// with the name of a parameter whose value on one rank is not finite. Throws Error if the layout has a parameter
  /// that the reference lacks.
  ParameterComparison(LayoutSide& parallelized, LayoutSide* reference, Communicator& world,
                      std::function<void(const std::string& name)> not_finite);

  const std::vector<std::string>& names() const noexcept { return names_; }
  const std::vector<std::int64_t>& shape(std::size_t index) const { return shapes_[index]; }  // of the full parameter
  const NamedTensor* here(std::size_t index) const;  // this rank's part; null: it is on another stage

  /// Rank 0's full value, on every rank; undefined on all ranks if it has none.
  at::Tensor send(std::size_t index, const ValueOf& value) const;
  /// Returns, for each parameter, the rank with the largest difference, relative to the norm of the reference's value
  /// or to `least_norm`, where that is more.
  std::vector<ParameterCheck> compare(const ValueOf& value, const Explain& explain = nullptr,
                                      double least_norm = 0) const;
  /// Compares with parameters in the same layout; each rank compares with its own.
  std::vector<ParameterCheck> compare_same_parts(const std::vector<NamedTensor>& others, const ValueOf& value) const;
  /// ENSURES: both sides have the layout's weights, so that each step is compared by itself. How far two runs diverge
  /// over several steps depends on the model and the learning rate, not on the layout.
  void take_weights_of_layout() const;
  /// ENSURES: the reference has the layout's gradients, so that both optimizers are given the same.
  void take_gradients_of_layout() const;

 private:
  /// Of the first holder of each of its elements. On the host.
  at::Tensor whole_of_layout(std::size_t index, const ValueOf& value) const;
  void share_names();
  void find_own_parts();
  std::vector<ParameterCheck> worst_of_ranks(const std::vector<std::string>& mine) const;

  LayoutSide& parallelized_;
  LayoutSide* reference_;  // on rank 0
  Communicator& world_;
  std::function<void(const std::string&)> not_finite_;
  std::vector<std::string> names_;
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<NamedTensor> mine_;  // by index; without a name if this rank has no part
  std::set<std::size_t> own_;      // parts of which this rank is the first holder
};

}  // namespace phalanx::verify
