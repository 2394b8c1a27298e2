#include "phalanx/infer/model_files.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/checkpoint/checkpoint_list.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/hf_weights.h"
#include "phalanx/checkpoint/manifest.h"
#include "phalanx/models/hf_config.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/llama_json.h"
#include "phalanx/nn/init.h"

namespace phalanx::infer {
namespace {

bool is_file(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
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
  files.config = models::llama_config_from_hf(read_file(config, models::kMaxHfConfigBytes), config.string());
  look_for_tokenizer(files, {path});
  return files;
}

}  // namespace

ModelFiles find_model(const std::filesystem::path& path) {
  if (is_file(path / "config.json")) return find_hugging_face_model(path);
  ModelFiles files{.weights = resolve_checkpoint(path)};
  const CheckpointReader reader(files.weights);
  const auto metadata = nlohmann::json::parse(reader.manifest().metadata);
  const auto where = (files.weights / kManifestName).string();
  if (!metadata.contains("model") || !metadata["model"].is_object())
    throw CheckpointError(
        fmt::format("{} does not say the model's shape (metadata.model): it was not saved by `phalanx train`", where));
  files.config = models::llama_from_metadata(metadata["model"], where + ": metadata.model");
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
  refuse_more_parameters_than_bytes(files.weights, files.config.parameter_count(),
                                    (files.weights / (files.hugging_face ? "config.json" : kManifestName)).string());
  auto model =
      std::make_shared<models::Llama>(files.config, nn::TensorOptionsOfModule{.dtype = dtype, .device = device});
  load_weights(files.weights, nn::named_parameters(*model),
               files.hugging_face ? hf_weights(files.config) : LoadWeightsOptions());
  model->eval();
  return model;
}

}  // namespace phalanx::infer
