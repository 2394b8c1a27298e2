#include "phalanx/lecture/excerpt.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx::lecture {
namespace {

using Lines = std::vector<std::string>;

Lines split(std::string_view text) {
  Lines lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::size_t indentation_of(const std::string& line) { return std::min(line.find_first_not_of(' '), line.size()); }

/// A comment, a macro or a call that ends here is none; a definition's first line stands at most two blanks deep.
bool begins_function(const std::string& line, std::string_view name) {
  const std::size_t at = line.find(fmt::format("{}(", name));
  if (at == std::string::npos || indentation_of(line) > 2 || line.find("//") < at || line.ends_with(";")) return false;
  const char before = at == 0 ? '\0' : line[at - 1];
  return before == ' ' || before == '&' || before == '*';
}

/// With the comment right above it: begin and end.
std::optional<std::pair<Lines::const_iterator, Lines::const_iterator>> find_function(const Lines& lines,
                                                                                     std::string_view name) {
  auto first = std::find_if(lines.begin(), lines.end(), [&](const auto& line) { return begins_function(line, name); });
  if (first == lines.end()) return {};
  // The body ends with the first brace that stands as deep as the function.
  const std::string closing = std::string(indentation_of(*first), ' ') + "}";
  const bool is_one_line = first->ends_with("}");
  const auto last = is_one_line ? first : std::find_if(first, lines.end(), [&](const std::string& line) {
    const std::string rest = line.starts_with(closing) ? line.substr(closing.size()) : "x";
    return rest.empty() || rest == ";" || rest.starts_with("  //");
  });
  if (last == lines.end()) return {};
  const auto is_head = [&](const std::string& line) {
    return line.substr(indentation_of(line)).starts_with("//") || line.starts_with("template");
  };
  while (first != lines.begin() && is_head(*(first - 1))) --first;
  return std::pair(first, last + 1);
}

std::string without_indentation(const Lines& lines) {
  std::size_t shared = std::string::npos;
  for (const std::string& line : lines) {
    if (!line.empty()) shared = std::min(shared, indentation_of(line));
  }
  std::string text;
  for (const std::string& line : lines) text += (line.empty() ? line : line.substr(shared)) + "\n";
  return text;
}

}  // namespace

std::string function_of(std::string_view source, std::string_view name, std::string_view file) {
  return functions_of(source, name, name, file);
}

std::string functions_of(std::string_view source, std::string_view first, std::string_view last,
                         std::string_view file) {
  const Lines lines = split(source);
  const auto begin = find_function(lines, first), end = find_function(lines, last);
  for (const auto& [found, name] : {std::pair(begin, first), std::pair(end, last)}) {
    if (!found) throw Error(fmt::format("{} has no function '{}'", file, name));
  }
  if (end->first < begin->first) throw Error(fmt::format("{} has '{}' after '{}'", file, first, last));
  return without_indentation(Lines(begin->first, end->second));
}

std::string lines_of(std::string_view source, std::string_view first, std::string_view last, std::string_view file) {
  const Lines lines = split(source);
  const auto holds = [](std::string_view text) {
    return [text](const std::string& line) { return line.find(text) != std::string::npos; };
  };
  const auto begin = std::find_if(lines.begin(), lines.end(), holds(first));
  const auto end = std::find_if(begin, lines.end(), holds(last));
  if (end == lines.end()) {
    throw Error(fmt::format("{} has no line with '{}', followed by one with '{}'", file, first, last));
  }
  return without_indentation(Lines(begin, end + 1));
}

}  // namespace phalanx::lecture
