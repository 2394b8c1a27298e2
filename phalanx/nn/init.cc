#include "phalanx/nn/init.h"

#include <ATen/ops/empty.h>

#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include "phalanx/kernels/fused_linear.h"
#include "phalanx/nn/module.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/tensor/grad_ready.h"

namespace phalanx::nn {
namespace {

Init foreign_init(const std::string& name, const at::Tensor& parameter) {
  if (parameter.dim() < 2) return Init::constant(name == "weight" ? 1.0 : 0.0);
  const double fan_in = static_cast<double>(parameter.numel()) / static_cast<double>(parameter.size(0));
  const double bound = 1.0 / std::sqrt(fan_in);
  return Init::uniform(-bound, bound);
}

template <class Visit>
void for_each_module(const torch::nn::Module& model, Visit&& visit) {
  visit("", model);  // separately, because a model on the stack has no shared_ptr to itself
  for (const auto& module : model.named_modules("", /*include_self=*/false)) visit(module.key() + ".", *module.value());
}

}  // namespace

std::vector<ParameterInit> parameter_inits(torch::nn::Module& model) {
  std::vector<ParameterInit> result;
  std::unordered_set<const void*> seen;  // a tied parameter belongs to the first module that names it
  for_each_module(model, [&](const std::string& prefix, const torch::nn::Module& module) {
    const auto* ours = dynamic_cast<const Module*>(&module);
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      const std::string& name = parameter.key();
      if (!seen.insert(parameter.value().unsafeGetTensorImpl()).second) continue;
      result.push_back({prefix + name, parameter.value(),
                        ours != nullptr ? ours->init_of(name) : foreign_init(name, parameter.value()),
                        ours != nullptr ? ours->shard_of(name) : nullptr});
    }
  });
  return result;
}

void initialise(torch::nn::Module& model, std::uint64_t seed) {
  materialize(model);
  for (const auto& [name, parameter, init, shard] : parameter_inits(model)) {
    shard ? fill_shard(parameter, init, seed, shard->spec, shard->rank) : fill(parameter, init, seed, name);
  }
}

void materialize(torch::nn::Module& model) {
  const observe::MemoryScope scope(observe::MemoryCategory::parameters);
  for_each_module(model, [](const std::string& /*prefix*/, const torch::nn::Module& module) {
    const auto* const ours = dynamic_cast<const Module*>(&module);
    if (ours == nullptr) return;
    for (const auto& group : ours->one_products()) kernels::allocate_adjacent(group);
  });
  for (const auto& parameter : model.parameters()) {
    if (!has_memory(parameter)) parameter.set_data(at::empty(parameter.sizes(), parameter.options()));
  }
  for_each_module(model, [](const std::string& /*prefix*/, const torch::nn::Module& module) {
    if (const auto* ours = dynamic_cast<const Module*>(&module)) ours->share_storage();
  });
}

std::vector<NamedTensor> named_parameters(const torch::nn::Module& model) {
  std::vector<NamedTensor> result;
  std::unordered_map<const void*, std::shared_ptr<const Shard>> shards;
  for_each_module(model, [&](const std::string& /*prefix*/, const torch::nn::Module& module) {
    const auto* ours = dynamic_cast<const Module*>(&module);
    if (ours == nullptr) return;
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      if (auto shard = ours->shard_of(parameter.key())) shards[parameter.value().unsafeGetTensorImpl()] = shard;
    }
  });
  std::unordered_set<const void*> seen;
  for (const auto& parameter : model.named_parameters()) {
    if (seen.insert(parameter.value().unsafeGetTensorImpl()).second) {
      const auto shard = shards.find(parameter.value().unsafeGetTensorImpl());
      result.push_back({parameter.key(), parameter.value(), shard == shards.end() ? nullptr : shard->second});
    }
  }
  return result;
}

}  // namespace phalanx::nn
