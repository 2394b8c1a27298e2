// Files of JSON lines, as prompts, questions and results are. Knows no tensor.
//
//   each_line(text, "prompts.jsonl", [&](std::string_view line, const std::string& where) {
//     const auto object = parse_json_object<DataError>(line, where);  // base/json_text.h
//   });
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx::infer {

/// Calls `use` with every line but those that are empty or blank, without its end ("\n" or "\r\n"), and with where it
/// stands: "NAME, line 3". A mark of UTF-8 before the first line is no part of it; text in UTF-16 is a DataError
/// (byte_order_mark.h).
void each_line(std::string_view text, const std::string& name,
               const std::function<void(std::string_view line, const std::string& where)>& use);

/// What to say of a file of which no line could be taken: "NAME holds no prompts", and how many were skipped, the first
/// with its reason.
std::string no_line_left(const std::string& name, const std::string& what, const std::vector<std::string>& skipped);

}  // namespace phalanx::infer
