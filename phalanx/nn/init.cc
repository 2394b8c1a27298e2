#include "phalanx/nn/init.h"

#include <cmath>
#include <unordered_set>

#include "phalanx/nn/module.h"

namespace phalanx::nn {
namespace {

Init foreign_init(const std::string& name, const at::Tensor& parameter) {
  if (parameter.dim() < 2) return Init::constant(name == "weight" ? 1.0 : 0.0);
  const double fan_in = static_cast<double>(parameter.numel()) / static_cast<double>(parameter.size(0));
  const double bound = 1.0 / std::sqrt(fan_in);
  return Init::uniform(-bound, bound);
}

}  // namespace

std::vector<ParameterInit> parameter_inits(torch::nn::Module& model) {
  std::vector<ParameterInit> result;
  std::unordered_set<const void*> seen;  // a tied parameter belongs to the first module that names it
  const auto visit = [&](const std::string& prefix, const torch::nn::Module& module) {
    const auto* ours = dynamic_cast<const Module*>(&module);
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      const std::string& name = parameter.key();
      if (!seen.insert(parameter.value().unsafeGetTensorImpl()).second) continue;
      result.push_back({prefix + name, parameter.value(),
                        ours != nullptr ? ours->init_of(name) : foreign_init(name, parameter.value())});
    }
  };
  visit("", model);  // apart from the rest, because a model on the stack has no shared_ptr to itself
  for (const auto& module : model.named_modules("", /*include_self=*/false)) visit(module.key() + ".", *module.value());
  return result;
}

void initialise(torch::nn::Module& model, std::uint64_t seed) {
  for (const auto& [name, parameter, init] : parameter_inits(model)) fill(parameter, init, seed, name);
}

std::vector<NamedTensor> named_parameters(const torch::nn::Module& model) {
  std::vector<NamedTensor> result;
  std::unordered_set<const void*> seen;
  for (const auto& parameter : model.named_parameters()) {
    if (seen.insert(parameter.value().unsafeGetTensorImpl()).second) {
      result.push_back({parameter.key(), parameter.value()});
    }
  }
  return result;
}

}  // namespace phalanx::nn
