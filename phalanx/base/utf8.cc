#include "phalanx/base/utf8.h"

#include <cstring>

namespace phalanx {
namespace {

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

}  // namespace

Utf8Char last_char(std::string_view text) {
  for (std::size_t size = 1; size <= 4 && size <= text.size(); ++size) {
    const Utf8Char c = first_char(text.substr(text.size() - size));
    if (static_cast<std::size_t>(c.length) == size) return c;
  }
  return {};
}

Utf8Char first_char(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i])); };
  const std::uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const int length = lead >= 0xC2 && lead <= 0xDF   ? 2
                     : lead >= 0xE0 && lead <= 0xEF ? 3
                     : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                    : 0;
  if (length == 0 || text.size() < static_cast<std::size_t>(length)) return {};
  std::uint32_t code_point = lead & (0x7Fu >> length);
  for (int i = 1; i < length; ++i) {
    if (!is_continuation(text[i])) return {};
    code_point = code_point << 6 | (byte(i) & 0x3F);
  }
  constexpr std::uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code_point < kSmallest[length] || code_point > 0x10FFFF || (code_point >= 0xD800 && code_point <= 0xDFFF))
    return {};
  return {code_point, length};
}

std::size_t unfinished_tail(std::string_view text) {
  // Go back to the last lead byte. From there the text is unfinished if some continuation makes it valid.
  for (std::size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const std::string_view tail = text.substr(text.size() - back);
    if (is_continuation(tail[0])) continue;
    const auto lead = static_cast<unsigned char>(tail[0]);
    const std::size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                               : lead >= 0xE0 && lead <= 0xEF ? 3
                               : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                              : 0;
    if (back >= length) return 0;
    std::string whole(tail);
    if (back == 1) {  // the second byte decides about overlong forms, surrogates and the upper end
      whole += lead == 0xE0 ? '\xA0' : lead == 0xF0 ? '\x90' : '\x80';
    }
    while (whole.size() < length) whole += '\x80';
    return first_char(whole).length > 0 ? back : 0;
  }
  return 0;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    std::uint64_t eight = 0;  // a fast path for ASCII
    if (text.size() >= sizeof eight) {
      std::memcpy(&eight, text.data(), sizeof eight);
      if ((eight & 0x8080808080808080U) == 0) {
        text.remove_prefix(sizeof eight);
        continue;
      }
    }
    const int length = first_char(text).length;
    if (length == 0) return false;
    text.remove_prefix(static_cast<std::size_t>(length));
  }
  return true;
}

void append_utf8(std::uint32_t code_point, std::string& out) {
  if (code_point < 0x80) {
    out += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    out += static_cast<char>(0xC0 | code_point >> 6);
    out += static_cast<char>(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    out += static_cast<char>(0xE0 | code_point >> 12);
    out += static_cast<char>(0x80 | (code_point >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code_point & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | code_point >> 18);
    out += static_cast<char>(0x80 | (code_point >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (code_point >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code_point & 0x3F));
  }
}

}  // namespace phalanx
