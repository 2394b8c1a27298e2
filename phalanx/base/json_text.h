// JSON objects from elsewhere, or an error that says where the text stops being JSON.
//
//   const nlohmann::json config = parse_json_object<CheckpointError>(text, "model/config.json");
//   // model/config.json: not valid JSON at line 3, column 14: invalid literal; last read: ...
//   // model/config.json: expected a JSON object, found array
//
// A key that an object has twice is refused, since one of the two would be dropped. Text that nests deeper than
// json_depth.h allows is refused before it is parsed. Messages are printable ASCII whatever the text holds, and at most
// about 300 characters long.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx {

/// Puts the object that `text` is into `json`; otherwise says what is wrong with it ("not valid JSON at line 3, column
/// 14: ..."; in a text of one line "at column 14"), and leaves `json` alone.
std::optional<std::string> json_object_fault(std::string_view text, nlohmann::json& json);

/// The object that `text` is. Throws ErrorType, whose message begins with `where`.
template <class ErrorType>
nlohmann::json parse_json_object(std::string_view text, const std::string& where) {
  nlohmann::json json;
  if (const auto fault = json_object_fault(text, json)) throw ErrorType(where + ": " + *fault);
  return json;
}

/// What the JSON library says of a value, in our words: "its key 'rank' is missing", "expected number, found string".
/// For whoever reads values without asking first; json_reader.h names the key, too.
std::string json_value_fault(const nlohmann::json::exception& error);

}  // namespace phalanx
