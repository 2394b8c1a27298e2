#include "phalanx/parallel/pipeline/sequential_pipeline.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <unordered_map>

#include "phalanx/base/error.h"
#include "phalanx/layout/balance_stages.h"
#include "phalanx/nn/init.h"
#include "phalanx/schedule/generators.h"

namespace phalanx {
namespace {

std::vector<double> parameters_of_children(const torch::nn::SequentialImpl& whole) {
  std::vector<double> counts;
  for (const auto& child : whole.children()) {
    std::int64_t elements = 0;
    for (const at::Tensor& parameter : child->parameters()) elements += parameter.numel();
    counts.push_back(static_cast<double>(elements));
  }
  return counts;
}

std::vector<int> children_of_stages(const torch::nn::SequentialImpl& whole, int stages, const std::vector<int>& given) {
  const auto children = static_cast<int>(whole.size());
  if (children < stages) {
    throw ConfigError(fmt::format(
        "SequentialPipeline: {} stages of a Sequential with {} children: expected one for each", stages, children));
  }
  if (given.empty()) return balance_stages(parameters_of_children(whole), stages);
  if (static_cast<int>(given.size()) != stages || std::ranges::any_of(given, [](int count) { return count < 1; }) ||
      std::accumulate(given.begin(), given.end(), 0) != children) {
    throw ConfigError(fmt::format(
        "SequentialPipeline: children [{}]: expected {} numbers above 0, one for each stage, that add up to {}",
        fmt::join(given, ", "), stages, children));
  }
  return given;
}

// Stages on different ranks would train copies of such a parameter, each on a part of its gradient.
void require_untied(const torch::nn::SequentialImpl& whole) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  std::size_t child = 0;
  for (const auto& module : whole.children()) {
    for (const auto& parameter : module->named_parameters()) {
      const std::string name = fmt::format("{}.{}", child, parameter.key());
      const auto [first, is_new] = names.try_emplace(parameter.value().unsafeGetTensorImpl(), name);
      if (!is_new && !first->second.starts_with(fmt::format("{}.", child)))
        throw ConfigError(
            fmt::format("SequentialPipeline: parameter '{}' is '{}', too: expected a parameter in one child alone; "
                        "wrap what shares it in one module",
                        name, first->second));
    }
    ++child;
  }
}

}  // namespace

SequentialPipeline::SequentialPipeline(const torch::nn::SequentialImpl& whole, const Loss& loss,
                                       std::shared_ptr<Communicator> comm, const SequentialPipelineOptions& options) {
  const schedule::Schedule plan = schedule::make_schedule({.name = options.schedule,
                                                           .ranks = comm->size(),
                                                           .stages_per_rank = options.stages_per_rank,
                                                           .micro_batches = options.chunks});
  require_untied(whole);
  const auto parts = split_sequential(whole, children_of_stages(whole, plan.stages(), options.children));
  std::vector<PipelineStage> stages;
  for (const int s : plan.stages_of(comm->rank())) {
    const auto& part = parts[static_cast<std::size_t>(s)];
    stages.push_back(s + 1 == plan.stages() ? make_stage(s, part, loss) : make_stage(s, part));
    for (NamedTensor parameter : nn::named_parameters(*part)) parameters_.push_back(std::move(parameter));
  }
  runtime_ = std::make_unique<PipelineRuntime>(std::move(comm), plan, std::move(stages), options.runtime);
}

}  // namespace phalanx
