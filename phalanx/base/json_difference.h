// Compares two JSON documents key by key: what was saved with what is found.
//
//   for (const auto& d : json_differences(saved, found))
//     print(d.key, json_value_text(d.saved), json_value_text(d.found));
//   // optimizer.lr: saved 0.001, found 0.002
//
// Keys of nested objects are joined by dots; a list is one value. Numbers are compared by value: 1 equals 1.0.
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

/// Every value that is not an object, by its dotted key. An empty object has no values.
std::map<std::string, nlohmann::json> flat_json(const nlohmann::json& document);

/// The differences, sorted by key.
std::vector<JsonDifference> json_differences(const nlohmann::json& saved, const nlohmann::json& found);

/// The value for a message: as JSON, in printable ASCII, cut after about a hundred characters. "not set" for null and
/// for a missing value.
std::string json_value_text(const std::optional<nlohmann::json>& value);

}  // namespace phalanx
