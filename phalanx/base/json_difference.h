// What differs between two JSON documents, key by key: what was saved is compared with what is found.
//
//   for (const auto& d : json_differences(saved, found)) print(d.key, json_value_text(d.saved), ...);
//   // optimizer.lr: saved 0.001, found 0.002
//
// Keys of nested objects are joined by dots; a list is one value. Numbers are compared as values: 1 is 1.0.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace phalanx {

struct JsonDifference {
  std::string key;
  std::optional<nlohmann::json> saved, found;  // unset: that document does not have the key
};

/// Every value that is no object, by its dotted key. An empty object has none.
std::map<std::string, nlohmann::json> flat_json(const nlohmann::json& document);

/// By key.
std::vector<JsonDifference> json_differences(const nlohmann::json& saved, const nlohmann::json& found);

/// For messages: as JSON writes it, printable ASCII, cut after about a hundred characters; "not set" of null and of
/// what is not there.
std::string json_value_text(const std::optional<nlohmann::json>& value);

}  // namespace phalanx
