// A backward pass in two halves for modules that know nothing of it: first the gradient of the input, later those of
// the parameters.
//
// Which nodes of the graph lead to the input is found by walking it. The first half runs these alone, and remembers the
// gradient that arrives at each that also leads to parameters: the second half starts there, one run of the engine for
// each. Nodes return what they are asked for only, so nothing is computed twice but what a fused node computes
// together.
//
//   GraphSplit split(y, x, parameters);
//   at::Tensor dx = split.backward_input(dy);
//   split.backward_weight();                        // adds to the parameters' gradients, without an event
//
// Where a parameter's gradient would have to be put together from several places between the two halves (it is used
// twice), the first half does it all; where the input needs no gradient, the second does. What checkpoint() made cannot
// be split: its Error says so.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace phalanx {

class GraphSplit {
 public:
  /// y: what was computed from x, a leaf, and from the parameters.
  GraphSplit(const at::Tensor& y, const at::Tensor& x, std::vector<at::Tensor> parameters);
  ~GraphSplit();
  GraphSplit(GraphSplit&&) noexcept;
  GraphSplit& operator=(GraphSplit&&) noexcept;

  /// The gradient of x; undefined where it needs none.
  at::Tensor backward_input(const at::Tensor& dy);
  /// Once, after the first half. Lets go of the graph.
  void backward_weight();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phalanx
