// Cuts a template into tokens, as Jinja does with trim_blocks and lstrip_blocks: the first newline after a {% tag %} is
// left out, and so are the blanks before a tag that begins its line. {%- and -%} take all white space beside them, {%+
// and +%} none. A newline at the end of the template is left out.
//
//   for (const Token& token : tokens_of("{{ name }}!", "greeting")) ...
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace phalanx::jinja {

enum class TokenKind { data, block_begin, block_end, print_begin, print_end, name, text, integer, real, symbol, end };

struct Token {
  TokenKind kind = TokenKind::end;
  std::string text;  // of a text: after its escapes; of a symbol: "==", "["
  int line = 1;
};

/// The last token is of kind end. Throws DataError that names `name`, the line and the reason.
std::vector<Token> tokens_of(std::string_view source, const std::string& name);

[[noreturn]] void fail_at(const std::string& name, int line, const std::string& reason);

}  // namespace phalanx::jinja
