#include "phalanx/checkpoint/files/weight_index.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_text.h"
#include "phalanx/checkpoint/files/safetensors.h"

namespace phalanx {

std::map<std::string, std::string> parse_weight_index(const std::string& file, std::string_view text) {
  const auto fail = [&](const std::string& reason) { throw CheckpointError(fmt::format("{}: {}", file, reason)); };
  const auto json = parse_json_object<CheckpointError>(text, file);
  if (!json.contains("weight_map") || !json["weight_map"].is_object()) fail("expected an object \"weight_map\" in it");
  std::map<std::string, std::string> file_of;
  for (const auto& [tensor, value] : json["weight_map"].items()) {
    if (!value.is_string()) fail(fmt::format("the file of tensor {} is not a string", safetensors::quote_name(tensor)));
    const auto& name = value.get_ref<const std::string&>();
    if (!name.ends_with(".safetensors") || name.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos)
      fail(fmt::format(
          "the file of tensor {} is given as {}: expected the name of a .safetensors file in the same directory",
          safetensors::quote_name(tensor), safetensors::quote_name(name)));
    file_of[tensor] = name;
  }
  if (file_of.empty()) fail("weight_map is empty");
  return file_of;
}

void require_one_model(const std::filesystem::path& folder) {
  std::error_code error;
  if (std::filesystem::exists(folder / "adapter_config.json", error)) {
    throw CheckpointError(
        fmt::format("{} holds an adapter (PEFT: adapter_config.json): expected a model; give its base as --checkpoint "
                    "and this as --adapter, or add it to its base by `phalanx checkpoint merge`, or take the file away "
                    "to go on without it",
                    folder.string()));
  }
  const auto index = folder / kWeightIndexName;
  if (!std::filesystem::exists(index, error) || !std::filesystem::exists(folder / kSingleWeightsName, error)) return;
  for (const auto& [tensor, file] : parse_weight_index(index.string(), read_file(index, kMaxWeightIndexBytes))) {
    // The reader of the index reports missing files.
    if (file == kSingleWeightsName || !std::filesystem::exists(folder / file, error)) return;
  }
  throw CheckpointError(fmt::format(
      "{} holds two models: {}, and {}, which names other files; take one of them away (transformers reads the first)",
      folder.string(), kSingleWeightsName, kWeightIndexName));
}

}  // namespace phalanx
