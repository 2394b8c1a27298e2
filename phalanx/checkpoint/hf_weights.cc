#include "phalanx/checkpoint/hf_weights.h"

#include <memory>
#include <set>
#include <string>

#include "phalanx/models/hf_names.h"
#include "phalanx/models/llama_json.h"

namespace phalanx {

LoadWeightsOptions hf_weights(const models::LlamaConfig& config) {
  return {.place_in_file = [config](const std::string& name) { return models::hf_place(config, name); },
          .optional_prefix = models::hf_optional_prefix(config),
          .ignore = [config](const std::string& name) { return models::hf_may_ignore(config, name); }};
}

LoadWeightsOptions hf_weights_of_part(const models::LlamaConfig& config) {
  const auto of_model = std::make_shared<std::set<std::string>>();
  for (const auto& [name, shape] : models::llama_parameter_shapes(config)) {
    of_model->insert(models::hf_place(config, name).name);
  }
  LoadWeightsOptions options = hf_weights(config);
  options.ignore = [of_model, rest = options.ignore](const std::string& name) {
    return of_model->contains(name) || rest(name);
  };
  return options;
}

}  // namespace phalanx
