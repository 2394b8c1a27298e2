#include "phalanx/train/hf_export.h"

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/hf_model.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/models/hf_config.h"
#include "phalanx/models/hf_names.h"

namespace phalanx::train {

std::filesystem::path export_in_hf(const std::filesystem::path& folder, const models::LlamaConfig& model,
                                   const std::vector<NamedTensor>& weights, const std::filesystem::path& assets) {
  // Read first: the folder may be the one that they are in.
  const auto texts = assets.empty() ? std::map<std::string, std::string>() : hf_assets(assets);
  std::filesystem::create_directories(folder);
  export_weights(folder / "model.safetensors", weights,
                 {.place_in_file = [&](const std::string& name) { return models::hf_place(model, name); }},
                 posix_file_system());
  for (const auto& [name, text] : texts) replace_file(folder / name, text);
  replace_file(folder / "config.json", models::llama_hf_config(model, "float32"));
  return folder / "model.safetensors";
}

}  // namespace phalanx::train
