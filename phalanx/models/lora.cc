#include "phalanx/models/lora.h"

#include <set>
#include <string>

namespace phalanx::models {

void add_lora(Llama& model, const LoraOptions& options) {
  const std::vector<std::string> names = lora_layers(model.config(), options);
  const std::set<std::string> chosen(names.begin(), names.end());
  if (chosen.empty()) return;
  const nn::AdapterOptions adapter{.rank = options.rank,
                                   .scale = options.scale(),
                                   .dropout = options.dropout,
                                   .b = options.zero_b ? Init::constant(0.0) : Init::normal(0.0, 0.02)};
  for (const auto& module : model.named_modules("", /*include_self=*/false)) {
    if (!chosen.contains(module.key())) continue;
    dynamic_cast<nn::Linear&>(*module.value()).add_adapter(adapter);
  }
}

}  // namespace phalanx::models
