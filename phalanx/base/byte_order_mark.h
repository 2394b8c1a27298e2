// The mark that some editors and exporters put before a text: one rule for every text that is read.
//
// UTF-8's (EF BB BF) is no part of the text and is passed over. Text in UTF-16 or UTF-32 is refused, with how to
// convert it. A mark anywhere but at the start is a character like others.
//
//   const std::string_view toml = text_after_mark<ConfigError>(read_file(path), path);  // of a string that lives
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace phalanx {

/// "UTF-8", "UTF-16LE", "UTF-16BE", "UTF-32LE" or "UTF-32BE"; nothing where the text begins with no mark.
std::optional<std::string_view> encoding_by_mark(std::string_view text);

/// The reason why a text with this beginning cannot be read, if there is one.
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
