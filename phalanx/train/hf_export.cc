#include "phalanx/train/hf_export.h"

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/hf_files.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/models/config/hf_names.h"

namespace phalanx::train {
namespace {

at::ScalarType type_of_export(const std::string& name) {
  if (name == "bfloat16") return at::kBFloat16;
  return name == "float16" ? at::kHalf : at::kFloat;
}

}  // namespace

std::vector<std::filesystem::path> export_in_hf(const std::filesystem::path& folder, const models::LlamaConfig& model,
                                                const std::vector<NamedTensor>& weights,
                                                const HfExportOptions& options) {
  // Read before the folder is written: it may be the folder that they are in.
  const auto texts = hf_files(model, options.dtype, options.assets);
  compare_end_tokens(texts, options.metadata);
  const std::string told = options.metadata.empty() ? metadata_of_model(model) : metadata_for_weights(options.metadata);
  auto paths = export_weights_to_folder(
      folder, weights,
      {.key_mapping = [&](const std::string& name) { return models::hf_tensor_view(model, name); },
       .dtype = type_of_export(options.dtype),
       .metadata = {{kMetadataInHeader, told}},
       .max_file_bytes = options.max_file_bytes},
      posix_file_system());
  for (const auto& [name, text] : texts) replace_file(folder / name, text);
  return paths;
}

}  // namespace phalanx::train
