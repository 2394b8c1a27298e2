#include "phalanx/models/lora.h"

#include <set>
#include <string>

namespace phalanx::models {

void add_lora(Llama& model, const LoraOptions& options, std::optional<at::ScalarType> dtype) {
  const std::vector<std::string> names = lora_layers(model.config(), options);
  const std::set<std::string> chosen(names.begin(), names.end());
  if (chosen.empty()) return;
  const nn::AdapterOptions adapter{.rank = options.rank,
                                   .scale = options.scale(),
                                   .dropout = options.dropout,
                                   .b = options.zero_b ? Init::constant(0.0) : Init::normal(0.0, 0.02),
                                   .dtype = dtype};
  for (const auto& module : model.named_modules("", /*include_self=*/false)) {
    if (!chosen.contains(module.key())) continue;
    dynamic_cast<nn::Linear&>(*module.value()).add_adapter(adapter);
  }
}

void store_in_nf4(Llama& model, const LoraOptions& options) {
  const std::vector<std::string> names = nf4_layers(model.config(), options);
  const std::set<std::string> chosen(names.begin(), names.end());
  nn::Linear::Nf4Tables tables;
  for (const auto& module : model.named_modules("", /*include_self=*/false)) {
    if (!chosen.contains(module.key())) continue;
    auto& linear = dynamic_cast<nn::Linear&>(*module.value());
    if (!tables) tables = kernels::Nf4Tables::make(linear.weight.device());
    linear.store_in_nf4(module.key(), tables);
  }
}

void use_narrow_base(Llama& model, at::ScalarType activations) {
  model.set_activation_dtype(activations);
  for (const auto& module : model.modules(/*include_self=*/false)) {
    if (auto* linear = dynamic_cast<nn::Linear*>(module.get())) linear->set_narrow_weight();
    if (auto* embedding = dynamic_cast<nn::Embedding*>(module.get())) embedding->set_output_dtype(activations);
  }
}

}  // namespace phalanx::models
