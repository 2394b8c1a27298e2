// Parses JSON objects that come from outside. An error says where the text stops being valid JSON.
//
//   const nlohmann::json config = parse_json_object<CheckpointError>(text, "model/config.json");
//   // model/config.json: not valid JSON at line 3, column 14: invalid literal; last read: ...
//   // model/config.json: expected a JSON object, found array
//
// An object with a duplicate key is refused, since one of the two values would be lost. Text that nests deeper than
// json_depth.h allows is refused before it is parsed. Messages are printable ASCII, whatever the text contains, and at
// most about 300 characters long.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx {

/// Parses `text` into `json` and returns nullopt. On an error returns what is wrong ("not valid JSON at line 3, column
/// 14: ..."; for a text of one line "at column 14") and leaves `json` unchanged.
std::optional<std::string> json_object_fault(std::string_view text, nlohmann::json& json);

/// Parses the object in `text`. Throws ErrorType; its message begins with `where`.
template <class ErrorType>
nlohmann::json parse_json_object(std::string_view text, const std::string& where) {
  nlohmann::json json;
  if (const auto fault = json_object_fault(text, json)) throw ErrorType(where + ": " + *fault);
  return json;
}

/// A plain message for the JSON library's error about a value: "its key 'rank' is missing", "expected number, found
/// string". For code that reads values without a check; json_reader.h names the key too.
std::string json_value_fault(const nlohmann::json::exception& error);

}  // namespace phalanx
