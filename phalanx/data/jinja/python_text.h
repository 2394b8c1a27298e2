// Text as Python has it: how values print, and the parts of `str` that templates use. Positions count code points.
//
//   repr(Value::list({"it's", 1.0}));                          // ["it's", 1.0]
//   strip("  a ", {}, {.left = true, .right = true});          // "a"
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/data/jinja/value.h"

namespace phalanx::jinja {

/// str(value): what {{ value }} prints.
std::string str(const Value& value);
std::string repr(const Value& value);
/// Shortest that reads back as the same number: 1.0, 1e-05, inf.
std::string float_text(double value);

struct JsonStyle {
  bool ensure_ascii = false;
  std::optional<std::string> indent;  // of one level
  std::string item_separator = ", ", key_separator = ": ";
  bool sort_keys = false;
};
/// json.dumps(). Throws EvaluationError for a value that is not JSON.
std::string to_json(const Value& value, const JsonStyle& style);

std::vector<std::string_view> characters_of(std::string_view text);
std::int64_t code_points(std::string_view text);
bool is_python_space(std::uint32_t code_point);

/// The position of the first `part`, or npos: in time that is linear, whatever the texts.
std::size_t find(std::string_view text, std::string_view part, std::size_t from = 0);

struct Sides {
  bool left = true, right = true;
};
/// Without the white space, or the characters of `set`, at its sides.
std::string_view strip(std::string_view text, std::optional<std::string_view> set = {}, Sides sides = {});
/// At runs of white space, without empty parts. At most `limit` cuts; negative: any number.
std::vector<std::string> split_at_spaces(std::string_view text, std::int64_t limit, bool from_right);
/// REQUIRES: `separator` is not empty.
std::vector<std::string> split_at(std::string_view text, std::string_view separator, std::int64_t limit,
                                  bool from_right);
std::vector<std::string> split_lines(std::string_view text, bool keep_ends);
/// Replaces the first `limit` occurrences; negative: all.
std::string replace(std::string_view text, std::string_view old, std::string_view by, std::int64_t limit);

std::string lower(std::string_view text);
std::string upper(std::string_view text);
std::string capitalize(std::string_view text);
/// str.title(): every run of letters begins with a capital.
std::string title(std::string_view text);
/// Jinja's filter `title`, which is not str.title(): what follows white space, - ( { [ or < begins with a capital.
std::string title_of_words(std::string_view text);
/// Runs of letters, numbers and underscores: \w+ of Python.
std::int64_t count_words(std::string_view text);
/// & < > ' " as MarkupSafe writes them.
std::string escape_html(std::string_view text);

}  // namespace phalanx::jinja
