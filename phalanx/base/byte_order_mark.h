// Byte order marks, which some editors and exporters put before a text. Every text reader uses this one rule.
//
// The UTF-8 mark (EF BB BF) is not part of the text and is skipped. Text in UTF-16 or UTF-32 is refused; the error says
// how to convert it. A mark that is not at the start is an ordinary character.
//
//   const std::string contents = read_file(path);  // must outlive the string_view
//   const std::string_view toml = text_after_mark<ConfigError>(contents, path);
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace phalanx {

/// "UTF-8", "UTF-16LE", "UTF-16BE", "UTF-32LE" or "UTF-32BE"; nullopt if the text does not begin with a mark.
std::optional<std::string_view> encoding_by_mark(std::string_view text);

/// The reason why a text with this beginning cannot be read; nullopt if it can.
std::optional<std::string> encoding_fault(std::string_view text);

inline constexpr std::string_view kUtf8Mark = "\xEF\xBB\xBF";

inline std::string_view without_utf8_mark(std::string_view text) {
  if (text.starts_with(kUtf8Mark)) text.remove_prefix(kUtf8Mark.size());
  return text;
}

/// The text without the mark. Throws ErrorType, whose message begins with `where`, for UTF-16 and UTF-32.
template <class ErrorType>
std::string_view text_after_mark(std::string_view text, const std::string& where) {
  if (const auto fault = encoding_fault(text)) throw ErrorType(where + ": " + *fault);
  return without_utf8_mark(text);
}

}  // namespace phalanx
