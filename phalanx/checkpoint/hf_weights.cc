#include "phalanx/checkpoint/hf_weights.h"

#include <memory>
#include <set>
#include <string>

#include "phalanx/models/config/hf_names.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx {

LoadWeightsOptions hf_weights(const models::LlamaConfig& config) {
  return {.key_mapping = [config](const std::string& name) { return models::hf_tensor_view(config, name); },
          .optional_prefix = models::hf_optional_prefix(config),
          .ignore = [config](const std::string& name) { return models::hf_may_ignore(config, name); },
          .copy_in_file =
              [config](const std::string& name) {
                return config.tie_embeddings && name == "tok_embeddings.weight" ? "lm_head.weight" : std::string();
              },
          .scales_in_file = config.family == models::LlamaFamily::deepseek_v3
                                ? [](const std::string& name) { return name + "_scale_inv"; }
                                : std::function<std::string(const std::string&)>(),
          .reads_mxfp4 = config.family == models::LlamaFamily::gpt_oss};
}

LoadWeightsOptions hf_weights_of_part(const models::LlamaConfig& config) {
  const auto of_model = std::make_shared<std::set<std::string>>();
  LoadWeightsOptions options = hf_weights(config);
  for (const auto& [name, shape] : models::llama_weight_shapes(config)) {
    const std::string in_file = models::hf_tensor_view(config, name).name;
    of_model->insert(in_file);
    if (options.reads_mxfp4) of_model->insert({in_file + kMxfp4Blocks, in_file + kMxfp4Scales});
    if (options.scales_in_file) of_model->insert(options.scales_in_file(in_file));
  }
  options.elsewhere = [of_model](const std::string& name) { return of_model->contains(name); };
  return options;
}

}  // namespace phalanx
