#include "cli/front/show_tokens.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "phalanx/base/utf8.h"

namespace phalanx::cli {
namespace {

/// Quotes the text. Unprintable characters and incomplete characters are written as \n or \xE2.
std::string quoted(std::string_view bytes) {
  std::string out = "\"";
  while (!bytes.empty()) {
    const auto first = static_cast<unsigned char>(bytes[0]);
    const auto c = first_char(bytes);
    const auto length = static_cast<std::size_t>(std::max(1, static_cast<int>(c.length)));
    if (first == '"' || first == '\\') {
      out += fmt::format("\\{}", bytes[0]);
    } else if (first == '\n') {
      out += "\\n";
    } else if (c.length == 0 || first < 0x20 || first == 0x7F) {
      out += fmt::format("\\x{:02X}", first);
    } else {
      out += bytes.substr(0, length);
    }
    bytes.remove_prefix(length);
  }
  return out + "\"";
}

}  // namespace

std::string shown_tokens(const data::BpeTokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.encode(text, {.add_special_tokens = true});
  std::string lines;
  for (const data::TokenId id : ids) {
    lines +=
        fmt::format("{:>8}  {}{}\n", id, quoted(tokenizer.bytes_of(id)), tokenizer.is_special(id) ? "  special" : "");
  }
  const auto end = tokenizer.end_of_text();
  lines += fmt::format("{} tokens, {} bytes; vocabulary of {}; ", ids.size(), text.size(), tokenizer.vocab_size());
  lines += end ? fmt::format("a document ends with {} ({})\n", *end, quoted(tokenizer.bytes_of(*end)))
               : std::string("no token ends a document\n");
  return lines;
}

}  // namespace phalanx::cli
