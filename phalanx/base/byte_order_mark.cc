#include "phalanx/base/byte_order_mark.h"

#include <fmt/format.h>

namespace phalanx {

std::optional<std::string_view> encoding_by_mark(std::string_view text) {
  using namespace std::string_view_literals;
  if (text.starts_with(kUtf8Mark)) return "UTF-8";
  if (text.starts_with("\xFF\xFE\0\0"sv)) return "UTF-32LE";
  if (text.starts_with("\0\0\xFE\xFF"sv)) return "UTF-32BE";
  if (text.starts_with("\xFF\xFE"sv)) return "UTF-16LE";
  if (text.starts_with("\xFE\xFF"sv)) return "UTF-16BE";
  return std::nullopt;
}

std::optional<std::string> encoding_fault(std::string_view text) {
  const auto encoding = encoding_by_mark(text);
  if (!encoding || *encoding == "UTF-8") return std::nullopt;
  // The name has no LE or BE. Then iconv takes the byte order from the mark and removes the mark.
  return fmt::format("this is {} text: expected UTF-8; convert it with `iconv -f {} -t UTF-8`", *encoding,
                     encoding->substr(0, 6));
}

}  // namespace phalanx
