#include "phalanx/config/model_config.h"

#include <fmt/format.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/models/config/hf_config.h"

namespace phalanx::config {

namespace {

models::LlamaConfig model_of_directory(const std::string& folder) {
  const std::string file = (std::filesystem::path(folder) / "config.json").string();
  std::error_code error;
  if (!std::filesystem::exists(file, error)) {
    std::string hint = hub_hint(folder);
    if (hint.empty()) hint = ": expected the directory of a Hugging Face model, with its config.json";
    throw FileError(fmt::format("[model] hf_assets_path '{}' has no config.json{}", folder, hint), ENOENT);
  }
  return models::llama_config_from_hf(read_file(file, models::kMaxHfConfigBytes), file);
}

}  // namespace

models::LlamaConfig model_config(const TrainConfig& config) {
  const bool is_directory = config.model.flavor == kFlavorOfDirectory;
  const models::LlamaFamily family = *models::family_from_name(config.model.name);  // the schema knows no others
  models::LlamaConfig model = is_directory ? model_of_directory(config.model.hf_assets_path)
                                           : models::llama_flavor(config.model.flavor, family);
  if (is_directory && family != models::LlamaFamily::llama && family != model.family) {
    throw ConfigError(fmt::format("[model] name is \"{}\", but the model in '{}' is a {}: expected that, or no name",
                                  config.model.name, config.model.hf_assets_path, models::family_name(model.family)));
  }
  const auto take = [](auto& number, auto given) {
    if (given != 0) number = given;
  };
  take(model.dim, config.model.dim);
  take(model.n_layers, config.model.n_layers);
  if (!is_directory && config.model.n_layers != 0) model = models::with_layer_pattern(model);
  take(model.n_heads, config.model.n_heads);
  take(model.n_kv_heads, config.model.n_kv_heads);
  take(model.ffn_hidden, config.model.ffn_hidden);
  take(model.vocab_size, config.model.vocab_size);
  take(model.rope_theta, config.model.rope_theta);
  take(model.norm_eps, config.model.norm_eps);
  if (config.model.tie_embeddings) model.tie_embeddings = *config.model.tie_embeddings;
  if (is_directory && config.training.seq_len > model.max_seq_len) {
    throw ConfigError(fmt::format(
        "[training] seq_len = {}, but the model in '{}' is of max_position_embeddings {}: expected at most that",
        config.training.seq_len, config.model.hf_assets_path, model.max_seq_len));
  }
  if (!is_directory) model.max_seq_len = config.training.seq_len;
  model.validate();
  return model;
}

TrainConfig with_model_numbers(TrainConfig config) {
  const models::LlamaConfig model = model_config(config);
  config.model.dim = model.dim;
  config.model.n_layers = model.n_layers;
  config.model.n_heads = model.n_heads;
  config.model.n_kv_heads = model.n_kv_heads;
  config.model.ffn_hidden = model.ffn_hidden;
  config.model.vocab_size = model.vocab_size;
  config.model.rope_theta = model.rope_theta;
  config.model.norm_eps = model.norm_eps;
  config.model.tie_embeddings = model.tie_embeddings;
  return config;
}

}  // namespace phalanx::config
