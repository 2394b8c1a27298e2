// Files of JSON lines, as prompts, questions and results are. Knows no tensor.
//
//   each_line(text, "prompts.jsonl", [&](std::string_view line, const std::string& where) {
//     const auto object = parse_json_object<DataError>(line, where);  // base/json_text.h
//   });
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace phalanx::infer {

/// Calls `use` with every line that is not empty, without its end ("\n" or "\r\n"), and with where it stands: "NAME,
/// line 3".
void each_line(std::string_view text, const std::string& name,
               const std::function<void(std::string_view line, const std::string& where)>& use);

}  // namespace phalanx::infer
