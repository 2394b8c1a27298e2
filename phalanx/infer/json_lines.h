// Files of JSON lines, as prompts, questions and results are. Knows no tensor.
//
//   each_line(text, "prompts.jsonl", [&](std::string_view line, const std::string& where) {
//     const nlohmann::json object = parse_object(line, where);
//   });
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace phalanx::infer {

/// Calls `use` with every line that is not empty, without its end ("\n" or "\r\n"), and with where it stands: "NAME,
/// line 3".
void each_line(std::string_view text, const std::string& name,
               const std::function<void(std::string_view line, const std::string& where)>& use);

/// DataError, beginning with `where`, for what is no JSON object or nests deeper than base/json_depth.h allows.
nlohmann::json parse_object(std::string_view line, const std::string& where);

}  // namespace phalanx::infer
