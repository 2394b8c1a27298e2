#include "phalanx/base/json_difference.h"

namespace phalanx {
namespace {

void flatten_json(const nlohmann::json& value, const std::string& key, std::map<std::string, nlohmann::json>& flat) {
  if (!value.is_object()) {
    flat.emplace(key, value);
    return;
  }
  for (const auto& [name, inner] : value.items()) {
    std::string below = key;
    if (!below.empty()) below += '.';
    flatten_json(inner, below.append(name), flat);
  }
}

}  // namespace

std::map<std::string, nlohmann::json> flat_json(const nlohmann::json& document) {
  std::map<std::string, nlohmann::json> flat;
  flatten_json(document, "", flat);
  return flat;
}

std::vector<JsonDifference> json_differences(const nlohmann::json& saved, const nlohmann::json& found) {
  const auto before = flat_json(saved), now = flat_json(found);
  std::map<std::string, JsonDifference> differences;
  for (const auto& [key, value] : before) {
    const auto same = now.find(key);
    if (same == now.end()) {
      differences[key] = {key, value, std::nullopt};
    } else if (same->second != value) {
      differences[key] = {key, value, same->second};
    }
  }
  for (const auto& [key, value] : now) {
    if (!before.contains(key)) differences[key] = {key, std::nullopt, value};
  }
  std::vector<JsonDifference> list;
  list.reserve(differences.size());
  for (auto& [key, difference] : differences) list.push_back(std::move(difference));
  return list;
}

std::string json_value_text(const std::optional<nlohmann::json>& value) {
  constexpr std::size_t kMost = 100;
  if (!value || value->is_null()) return "not set";
  std::string text = value->dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kMost) text = text.substr(0, kMost) + "...";
  return text;
}

}  // namespace phalanx
