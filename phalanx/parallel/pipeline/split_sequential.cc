#include "phalanx/parallel/pipeline/split_sequential.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {

struct SequentialPart::Children {
  std::vector<torch::nn::AnyModule> all;
};

SequentialPart::SequentialPart(const torch::nn::SequentialImpl& whole, int begin, int end)
    : torch::nn::Module("SequentialPart"), children_(std::make_unique<Children>()) {
  const auto names = whole.named_children();
  for (int i = begin; i < end; ++i) {
    children_->all.push_back(*(whole.begin() + i));
    const auto& child = names[static_cast<std::size_t>(i)];
    register_module(child.key(), child.value());
  }
}

SequentialPart::~SequentialPart() = default;

at::Tensor SequentialPart::forward(at::Tensor x) {
  for (auto& child : children_->all) x = child.forward<at::Tensor>(std::move(x));
  return x;
}

std::vector<std::shared_ptr<SequentialPart>> split_sequential(const torch::nn::SequentialImpl& whole,
                                                              const std::vector<int>& counts) {
  const auto children = static_cast<int>(whole.size());
  const bool all_positive = std::ranges::all_of(counts, [](int count) { return count > 0; });
  if (counts.empty() || !all_positive || std::accumulate(counts.begin(), counts.end(), 0) != children) {
    throw Error(fmt::format(
        "split_sequential: stages of [{}] children from a Sequential of {}; expected numbers above 0 that add up to {}",
        fmt::join(counts, ", "), children, children));
  }
  std::vector<std::shared_ptr<SequentialPart>> parts;
  int begin = 0;
  for (const int count : counts) {
    parts.push_back(std::make_shared<SequentialPart>(whole, begin, begin + count));
    begin += count;
  }
  return parts;
}

}  // namespace phalanx
