// GraphSplit: splits a backward pass into backward_input and backward_weight for modules that do not support it
// themselves.
//
// It walks the autograd graph to find the nodes that lead to the input. backward_input() runs only these. At each of
// them that also leads to parameters, it saves the arriving gradient. backward_weight() starts from there, with one run
// of the engine for each. A node computes only the gradients it is asked for, so nothing is computed twice, except what
// a fused node computes together.
//
//   GraphSplit split(y, x, parameters);
//   at::Tensor dx = split.backward_input(dy);
//   split.backward_weight();                        // adds to the parameters' gradients, without an event
//
// If a parameter is used twice, its gradient may have to be assembled from several places between the two halves. Then
// backward_input() does all the work. If the input needs no gradient, backward_weight() does all of it. A graph made by
// checkpoint() cannot be split: it throws an Error that explains this.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace phalanx {

class GraphSplit {
 public:
  /// `y` was computed from `x`, a leaf, and from the parameters.
  GraphSplit(const at::Tensor& y, const at::Tensor& x, std::vector<at::Tensor> parameters);
  ~GraphSplit();
  GraphSplit(GraphSplit&&) noexcept;
  GraphSplit& operator=(GraphSplit&&) noexcept;

  /// Returns the gradient of x, or an undefined tensor if x needs none.
  at::Tensor backward_input(const at::Tensor& dy);
  /// Frees the graph.
  /// REQUIRES: called once, after backward_input().
  void backward_weight();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phalanx
