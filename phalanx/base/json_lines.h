// Reads files of JSON lines: prompts, questions, conversations, results.
//
//   each_line(text, "prompts.jsonl", [&](std::string_view line, const std::string& where) {
//     const auto object = parse_json_object<DataError>(line, where);  // base/json_text.h
//   });
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

/// Calls `use` with every line that is not empty or blank, without its end ("\n" or "\r\n"), and with its location:
/// "NAME, line 3". A UTF-8 byte order mark before the first line is skipped. Throws DataError for text in UTF-16
/// (byte_order_mark.h).
void each_line(std::string_view text, const std::string& name,
               const std::function<void(std::string_view line, const std::string& where)>& use);

/// The message for a file without any usable line: "NAME holds no prompts", and how many lines were skipped, with the
/// reason of the first.
std::string no_line_left(const std::string& name, const std::string& what, const std::vector<std::string>& skipped);

}  // namespace phalanx
