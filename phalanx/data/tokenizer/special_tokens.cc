#include "phalanx/data/tokenizer/special_tokens.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_number.h"
#include "phalanx/base/json_text.h"

namespace phalanx::data {
namespace {

constexpr std::uint64_t kMaxDescriptionBytes = 64 << 20;

void take_name(const nlohmann::json& json, const char* key, const std::string& file, SpecialToken& token) {
  if (token.name || token.id || !json.contains(key) || json[key].is_null()) return;
  const nlohmann::json& value = json[key];
  const nlohmann::json* text = &value;  // a string, or an added token as an object
  if (value.is_object() && value.contains("content")) text = &value["content"];
  if (!text->is_string()) {
    throw DataError(fmt::format("{}: \"{}\" is {}: expected a token's text", file, key,
                                value.dump(-1, ' ', /*ensure_ascii=*/true).substr(0, 80)));
  }
  if (text->get_ref<const std::string&>().empty()) return;
  token.name = text->get<std::string>();
  token.said_by = file;
}

void take_id(const nlohmann::json& json, const char* key, const std::string& file, SpecialToken& token) {
  if (token.name || token.id || !json.contains(key)) return;
  const nlohmann::json* value = &json[key];
  if (value->is_array() && !value->empty()) value = &value->front();
  if (!is_whole_number(*value)) return;  // models/config/hf_config.h reports the error
  token.id = value->get<std::int64_t>();
  token.said_by = file;
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error) ? path : path.parent_path();
}

bool is_file(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

}  // namespace

SpecialTokens special_tokens_beside(const std::filesystem::path& path) {
  SpecialTokens tokens;
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}) {
    const auto file = folder_of(path) / name;
    if (!is_file(file)) continue;
    const auto json = parse_json_object<DataError>(read_file(file, kMaxDescriptionBytes), file.string());
    const bool has_ids = std::string_view(name) == "generation_config.json";
    const auto take = [&](const char* key, const char* key_of_id, SpecialToken& token) {
      has_ids ? take_id(json, key_of_id, file.string(), token) : take_name(json, key, file.string(), token);
    };
    take("bos_token", "bos_token_id", tokens.bos);
    take("eos_token", "eos_token_id", tokens.eos);
    take("pad_token", "pad_token_id", tokens.pad);
  }
  return tokens;
}

std::map<std::string, std::string> special_token_texts(const std::filesystem::path& path) {
  std::map<std::string, std::string> texts;
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    const auto file = folder_of(path) / name;
    if (!is_file(file)) continue;
    const auto json = parse_json_object<DataError>(read_file(file, kMaxDescriptionBytes), file.string());
    for (const char* key :
         {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
      SpecialToken token;
      take_name(json, key, file.string(), token);
      if (token.name) texts.emplace(key, *token.name);
    }
  }
  return texts;
}

}  // namespace phalanx::data
