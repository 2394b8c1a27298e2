#include "phalanx/infer/model_files.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/checkpoint/checkpoint_list.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"

namespace phalanx::infer {
namespace {

constexpr std::uint64_t kMaxConfigBytes = 16 << 20;

bool is_file(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

/// Reads keys of one JSON object; a missing or mistyped one is an error that names it.
class JsonReader {
 public:
  JsonReader(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {}

  template <class T>
  T get(const char* key) const {
    if (!object_.contains(key)) throw CheckpointError(fmt::format("{} has no \"{}\"", where_, key));
    try {
      return object_.at(key).get<T>();
    } catch (const nlohmann::json::exception&) {
      throw CheckpointError(fmt::format("{}: \"{}\" is {}, which is not what it should be", where_, key,
                                        object_.at(key).dump().substr(0, 80)));
    }
  }
  template <class T>
  T get_or(const char* key, T otherwise) const {
    return !object_.contains(key) || object_.at(key).is_null() ? otherwise : get<T>(key);
  }

 private:
  const nlohmann::json& object_;
  std::string where_;
};

models::LlamaConfig config_from_metadata(const nlohmann::json& model, const std::string& where) {
  const JsonReader read(model, where);
  models::LlamaConfig config;
  config.dim = read.get<std::int64_t>("dim");
  config.n_layers = read.get<std::int64_t>("n_layers");
  config.n_heads = read.get<std::int64_t>("n_heads");
  config.n_kv_heads = read.get<std::int64_t>("n_kv_heads");
  config.ffn_hidden = read.get<std::int64_t>("ffn_hidden");
  config.vocab_size = read.get<std::int64_t>("vocab_size");
  config.max_seq_len = read.get<std::int64_t>("max_seq_len");
  config.rope_theta = read.get<double>("rope_theta");
  config.norm_eps = read.get<double>("norm_eps");
  config.tie_embeddings = read.get<bool>("tie_embeddings");
  return config;
}

void look_for_tokenizer(ModelFiles& files, const std::vector<std::filesystem::path>& folders) {
  for (const auto& folder : folders) {
    const auto place = folder.filename() == "tokenizer.json" ? folder : folder / "tokenizer.json";
    files.tokenizer_places.push_back(place.string());
    if (!files.tokenizer && is_file(place)) files.tokenizer = place.string();
  }
}

ModelFiles find_hugging_face_model(const std::filesystem::path& path) {
  ModelFiles files{.weights = path, .hugging_face = true};
  const auto config = path / "config.json";
  files.config = llama_config_from_hf(read_file(config, kMaxConfigBytes), config.string());
  look_for_tokenizer(files, {path});
  return files;
}

}  // namespace

models::LlamaConfig llama_config_from_hf(const std::string& text, const std::string& file) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) throw CheckpointError(fmt::format("{}: expected a JSON object", file));
  const JsonReader read(json, file);
  const auto refuse = [&](const std::string& what) {
    throw CheckpointError(fmt::format("{}: {} is not supported", file, what));
  };
  if (const auto type = read.get<std::string>("model_type"); type != "llama")
    refuse(fmt::format("model_type \"{}\"", type));
  if (const auto act = read.get_or<std::string>("hidden_act", "silu"); act != "silu")
    refuse(fmt::format("hidden_act \"{}\"", act));
  for (const char* bias : {"attention_bias", "mlp_bias"})
    if (read.get_or<bool>(bias, false)) refuse(bias);
  models::LlamaConfig config;
  config.dim = read.get<std::int64_t>("hidden_size");
  config.n_layers = read.get<std::int64_t>("num_hidden_layers");
  config.n_heads = read.get<std::int64_t>("num_attention_heads");
  config.n_kv_heads = read.get_or<std::int64_t>("num_key_value_heads", config.n_heads);
  config.ffn_hidden = read.get<std::int64_t>("intermediate_size");
  config.vocab_size = read.get<std::int64_t>("vocab_size");
  config.max_seq_len = read.get<std::int64_t>("max_position_embeddings");
  config.rope_theta = read.get_or<double>("rope_theta", 10000.0);
  config.norm_eps = read.get_or<double>("rms_norm_eps", 1e-6);
  config.tie_embeddings = read.get_or<bool>("tie_word_embeddings", false);
  if (read.get_or<std::int64_t>("head_dim", config.head_dim()) != config.head_dim())
    refuse("a head_dim other than hidden_size / num_attention_heads");
  // Newer files keep the rotary settings in one object.
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!json.contains(key) || !json.at(key).is_object()) continue;
    const JsonReader rope(json.at(key), fmt::format("{}: {}", file, key));
    const auto type = rope.get_or<std::string>("rope_type", rope.get_or<std::string>("type", "default"));
    if (type != "default") refuse(fmt::format("{} of type \"{}\"", key, type));
    config.rope_theta = rope.get_or<double>("rope_theta", config.rope_theta);
  }
  return config;
}

ModelFiles find_model(const std::filesystem::path& path) {
  if (is_file(path / "config.json")) return find_hugging_face_model(path);
  ModelFiles files{.weights = resolve_checkpoint(path)};
  const CheckpointReader reader(files.weights);
  const auto metadata = nlohmann::json::parse(reader.manifest().metadata);
  const auto where = (files.weights / kManifestName).string();
  if (!metadata.contains("model") || !metadata["model"].is_object())
    throw CheckpointError(
        fmt::format("{} does not say the model's shape (metadata.model): it was not saved by `phalanx train`", where));
  files.config = config_from_metadata(metadata["model"], where + ": metadata.model");
  const auto checkpoints = std::filesystem::absolute(files.weights).lexically_normal().parent_path();
  std::vector<std::filesystem::path> folders{files.weights, checkpoints, checkpoints.parent_path()};
  if (const auto assets = metadata.value("hf_assets_path", std::string()); !assets.empty())
    folders.emplace_back(assets);
  look_for_tokenizer(files, folders);
  return files;
}

std::shared_ptr<models::Llama> load_model(const ModelFiles& files, c10::Device device, c10::ScalarType dtype) {
  try {
    files.config.validate();
  } catch (const ConfigError& error) {
    throw CheckpointError(fmt::format("{}: {}", files.weights.string(), error.what()));
  }
  auto model =
      std::make_shared<models::Llama>(files.config, nn::TensorOptionsOfModule{.dtype = dtype, .device = device});
  LoadWeightsOptions options;
  if (files.hugging_face) {
    options.name_in_file = models::llama_hf_name;
    options.ignore = [&](const std::string& name) {
      return name.ends_with("rotary_emb.inv_freq") || (files.config.tie_embeddings && name == "lm_head.weight");
    };
  }
  load_weights(files.weights, nn::named_parameters(*model), options);
  model->eval();
  return model;
}

}  // namespace phalanx::infer
