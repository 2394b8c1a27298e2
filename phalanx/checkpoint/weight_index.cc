#include "phalanx/checkpoint/weight_index.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/json_text.h"
#include "phalanx/checkpoint/safetensors.h"

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

}  // namespace phalanx
