// A torch::nn::Sequential in pipeline stages: ranges of its children, which keep their names ("3.weight").
//
//   torch::nn::Sequential net(torch::nn::Linear(16, 8), torch::nn::ReLU(), torch::nn::Linear(8, 4));
//   auto parts = split_sequential(net, {2, 1});                              // children of each stage
//   stages.push_back(make_stage(0, parts[0]));
//
// The children are shared with the Sequential, not copied; drop it, and a rank holds its own stages only. Every child's
// forward takes one tensor and returns one.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace torch::nn {
class SequentialImpl;
}

namespace phalanx {

class SequentialPart : public torch::nn::Module {
 public:
  /// Children [begin, end).
  SequentialPart(const torch::nn::SequentialImpl& whole, int begin, int end);
  ~SequentialPart() override;
  at::Tensor forward(at::Tensor x);

 private:
  struct Children;
  std::unique_ptr<Children> children_;
};

/// By how many children each stage has; every stage at least one. Throws Error unless they add up.
std::vector<std::shared_ptr<SequentialPart>> split_sequential(const torch::nn::SequentialImpl& whole,
                                                              const std::vector<int>& counts);
/// The same for the holder, torch::nn::Sequential.
template <class Holder>
requires requires(const Holder& holder) { holder.ptr(); }
std::vector<std::shared_ptr<SequentialPart>> split_sequential(const Holder& whole, const std::vector<int>& counts) {
  return split_sequential(*whole, counts);
}

}  // namespace phalanx
