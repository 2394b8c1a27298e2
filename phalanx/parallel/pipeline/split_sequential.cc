#include "phalanx/parallel/pipeline/split_sequential.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "phalanx/base/error.h"

namespace phalanx {

std::vector<std::shared_ptr<torch::nn::SequentialImpl>> split_sequential(const torch::nn::SequentialImpl& whole,
                                                                         const std::vector<int>& counts) {
  const auto children = static_cast<int>(whole.size());
  const bool all_positive = std::ranges::all_of(counts, [](int count) { return count > 0; });
  if (counts.empty() || !all_positive || std::accumulate(counts.begin(), counts.end(), 0) != children) {
    throw Error(fmt::format(
        "split_sequential: stages of [{}] children from a Sequential of {}; expected numbers above 0 that add up to {}",
        fmt::join(counts, ", "), children, children));
  }
  const auto names = whole.named_children();
  std::vector<std::shared_ptr<torch::nn::SequentialImpl>> parts;
  int next = 0;
  for (const int count : counts) {
    const auto& part = parts.emplace_back(std::make_shared<torch::nn::SequentialImpl>());
    for (const int end = next + count; next < end; ++next) {
      part->push_back(std::string(names[static_cast<std::size_t>(next)].key()),
                      torch::nn::AnyModule(*(whole.begin() + next)));
    }
  }
  return parts;
}

}  // namespace phalanx
