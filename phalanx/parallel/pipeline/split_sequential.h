// Splits a torch::nn::Sequential into pipeline stages: ranges of its children, which keep their names ("3.weight").
//
//   torch::nn::Sequential net(torch::nn::Linear(16, 8), torch::nn::ReLU(), torch::nn::Linear(8, 4));
//   auto parts = split_sequential(net, {2, 1});                              // children of each stage
//   stages.push_back(make_stage(0, parts[0]));                               // a Sequential, too
//
// The children are shared with the original Sequential, not copied. Drop the original, and a rank holds only its own
// stages.
//
// REQUIRES: every child's forward takes one tensor and returns one.
#pragma once

#include <memory>
#include <vector>

namespace torch::nn {
class SequentialImpl;
}

namespace phalanx {

/// `counts` gives the number of children of each stage, at least one. Throws Error unless they add up.
std::vector<std::shared_ptr<torch::nn::SequentialImpl>> split_sequential(const torch::nn::SequentialImpl& whole,
                                                                         const std::vector<int>& counts);
/// The same for the holder, torch::nn::Sequential.
template <class Holder>
requires requires(const Holder& holder) { holder.ptr(); }
std::vector<std::shared_ptr<torch::nn::SequentialImpl>> split_sequential(const Holder& whole,
                                                                         const std::vector<int>& counts) {
  return split_sequential(*whole, counts);
}

}  // namespace phalanx
