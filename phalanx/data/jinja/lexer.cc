#include "phalanx/data/jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "phalanx/base/error.h"
#include "phalanx/base/utf8.h"
#include "phalanx/data/jinja/python_text.h"

namespace phalanx::jinja {
namespace {

constexpr std::size_t kMostTokens = 1 << 20;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_name_part(char c) { return is_name_start(c) || is_digit(c); }

std::string with_plain_newlines(std::string_view source) {
  std::string out;
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r' && i + 1 < source.size() && source[i + 1] == '\n') continue;
    out += source[i] == '\r' ? '\n' : source[i];
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

std::string printable_character(std::string_view text) {
  const unsigned char c = static_cast<unsigned char>(text.front());
  return c > ' ' && c < 0x7F ? std::string(1, text.front()) : fmt::format("\\x{:02x}", c);
}

int digit_value(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : 99;
}

class Lexer {
 public:
  Lexer(std::string_view source, const std::string& name) : source_(with_plain_newlines(source)), name_(name) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) next_part();
    add(TokenKind::end, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const { fail_at(name_, line_, reason); }
  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  void add(TokenKind kind, std::string text) {
    if (tokens_.size() >= kMostTokens) fail(fmt::format("the template has more than {} tokens", kMostTokens));
    tokens_.push_back({kind, std::move(text), line_});
  }
  void advance(std::size_t count) {
    line_ += static_cast<int>(std::ranges::count(rest().substr(0, count), '\n'));
    at_ += count;
    if (count > 0) begins_line_ = source_[at_ - 1] == '\n';
  }
  void skip_space() {
    const std::string_view text = rest();
    advance(text.size() - strip(text, {}, {.left = true, .right = false}).size());
  }

  /// Text up to the next tag, then the tag.
  void next_part() {
    const std::size_t tag = next_tag();
    const char kind = tag < source_.size() ? source_[tag + 1] : '\0';
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    const bool has_sign = sign == '-' || sign == '+';
    add_data(std::string_view(source_).substr(at_, tag - at_), kind, sign);
    advance(tag - at_);
    if (kind == '\0') return;
    if (kind == '#') return comment(has_sign ? 3 : 2);
    if (kind == '%' && raw_block(has_sign ? 3 : 2)) return;
    add(kind == '%' ? TokenKind::block_begin : TokenKind::print_begin, "");
    advance(has_sign ? 3 : 2);
    kind == '%' ? expression('%', TokenKind::block_end) : expression('}', TokenKind::print_end);
  }

  std::size_t next_tag() const {
    for (std::size_t at = at_; at + 1 < source_.size(); ++at) {
      at = source_.find('{', at);
      if (at == std::string::npos || at + 1 == source_.size()) break;
      if (std::string_view("{%#").find(source_[at + 1]) != std::string_view::npos) return at;
    }
    return source_.size();
  }

  void add_data(std::string_view text, char tag, char sign) {
    if (sign == '-' && tag != '\0') {
      text = strip(text, {}, {.left = false, .right = true});
    } else if (sign != '+' && (tag == '%' || tag == '#')) {
      const std::size_t newline = text.rfind('\n');
      const std::size_t start = newline == std::string_view::npos ? 0 : newline + 1;
      if ((start > 0 || begins_line_) && strip(text.substr(start)).empty()) text = text.substr(0, start);
    }
    if (!text.empty()) add(TokenKind::data, std::string(text));
  }

  /// After the characters of an end, such as %}: the white space or the newline that goes with it.
  void after_end(bool takes_all, bool takes_newline) {
    if (takes_all) {
      skip_space();
    } else if (takes_newline && rest().starts_with('\n')) {
      advance(1);
    }
  }

  void comment(std::size_t begin) {
    advance(begin);
    const std::size_t end = source_.find("#}", at_);
    if (end == std::string::npos) fail("a comment {# has no end #}");
    const char sign = end > at_ ? source_[end - 1] : '\0';
    advance(end + 2 - at_);
    after_end(sign == '-', sign != '+');
  }

  /// {% raw %}...{% endraw %}: text that is no template.
  bool raw_block(std::size_t begin) {
    const auto after_name = word_after(at_ + begin, "raw");
    if (!after_name) return false;
    const bool strips = source_.compare(*after_name, 1, "-") == 0;
    if (source_.compare(*after_name + (strips ? 1 : 0), 2, "%}") != 0) return false;
    advance(*after_name + (strips ? 3 : 2) - at_);
    if (strips) skip_space();
    for (std::size_t tag = source_.find("{%", at_); tag != std::string::npos; tag = source_.find("{%", tag + 1)) {
      const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
      const auto end = word_after(tag + (sign == '-' || sign == '+' ? 3 : 2), "endraw");
      if (!end) continue;
      const char last = *end < source_.size() ? source_[*end] : '\0';
      const std::size_t close = *end + (last == '-' || last == '+' ? 1 : 0);
      if (source_.compare(close, 2, "%}") != 0) continue;
      add_data(std::string_view(source_).substr(at_, tag - at_), '%', sign);
      advance(close + 2 - at_);
      after_end(last == '-', last != '+');
      return true;
    }
    fail("{% raw %} has no {% endraw %}");
  }

  /// The position after `word` and the blanks around it, if it stands at `at`.
  std::optional<std::size_t> word_after(std::size_t at, std::string_view word) const {
    const auto blanks = [&] {
      while (at < source_.size() && std::string_view(" \t\n\v\f\r").find(source_[at]) != std::string_view::npos) ++at;
    };
    blanks();
    if (source_.compare(std::min(at, source_.size()), word.size(), word) != 0) return std::nullopt;
    at += word.size();
    if (at < source_.size() && is_name_part(source_[at])) return std::nullopt;
    blanks();
    return at;
  }

  void expression(char closer, TokenKind end) {
    const std::string plain = {closer, '}'};
    for (std::vector<char> open;;) {
      skip_space();
      if (rest().empty()) fail(fmt::format("a tag has no end {}", plain));
      const bool has_sign = rest().front() == '-' || (rest().front() == '+' && end == TokenKind::block_end);
      if (open.empty() && rest().substr(has_sign ? 1 : 0).starts_with(plain)) {
        add(end, "");
        const char sign = has_sign ? rest().front() : '\0';
        advance(has_sign ? 3 : 2);
        return after_end(sign == '-', end == TokenKind::block_end && sign != '+');
      }
      token(open);
    }
  }

  void token(std::vector<char>& open) {
    const char c = rest().front();
    if (is_digit(c)) return number();
    if (is_name_start(c)) return name();
    if (c == '"' || c == '\'') return text(c);
    symbol(open);
  }

  void name() {
    std::size_t size = 0;
    while (size < rest().size() && is_name_part(rest()[size])) ++size;
    add(TokenKind::name, std::string(rest().substr(0, size)));
    advance(size);
  }

  std::size_t digits(std::size_t from) const {
    std::size_t at = from;
    while (at < rest().size() && (is_digit(rest()[at]) || (rest()[at] == '_' && at > from))) ++at;
    return at;
  }
  void number() {
    const std::string_view text = rest();
    std::size_t size = digits(0);
    bool is_real = false;
    if (text.starts_with('0') && size < text.size() &&
        std::string_view("xXoObB").find(text[size]) != std::string_view::npos) {
      fail("a number of another base than ten is not supported");
    }
    const auto digit_at = [&](std::size_t at) { return at < text.size() && is_digit(text[at]); };
    if (size < text.size() && text[size] == '.' && digit_at(size + 1)) {
      is_real = true;
      size = digits(size + 1);
    }
    if (size < text.size() && (text[size] == 'e' || text[size] == 'E')) {
      const std::size_t sign = size + 1 < text.size() && (text[size + 1] == '+' || text[size + 1] == '-') ? 1 : 0;
      if (digit_at(size + 1 + sign)) {
        is_real = true;
        size = digits(size + 1 + sign);
      }
    }
    std::string plain(text.substr(0, size));
    std::erase(plain, '_');
    add(is_real ? TokenKind::real : TokenKind::integer, std::move(plain));
    advance(size);
  }

  void text(char quote) {
    std::size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail(fmt::format("a text has no end {}", quote));
    add(TokenKind::text, unescaped(std::string_view(source_).substr(at_ + 1, end - at_ - 1)));
    advance(end + 1 - at_);
  }

  std::string unescaped(std::string_view text) const {
    constexpr std::string_view kNames = "\\'\"abfnrtv", kValues = "\\'\"\a\b\f\n\r\t\v";
    std::string out;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '\\' || i + 1 == text.size()) {
        out += text[i];
        continue;
      }
      const char c = text[++i];
      if (const auto known = kNames.find(c); known != std::string_view::npos) {
        out += kValues[known];
      } else if (c == 'x' || c == 'u' || c == 'U') {
        i += code_point(text.substr(i + 1), c == 'x' ? 2 : c == 'u' ? 4 : 8, 16, out);
      } else if (c >= '0' && c <= '7') {
        i += octal(text.substr(i), out) - 1;
      } else if (c == 'N') {
        fail("the escape \\N{...} is not supported");
      } else if (c != '\n') {
        out += {'\\', c};
      }
    }
    return out;
  }
  std::size_t octal(std::string_view text, std::string& out) const {
    std::size_t size = 1;
    while (size < 3 && size < text.size() && text[size] >= '0' && text[size] <= '7') ++size;
    return code_point(text, size, 8, out);
  }
  std::size_t code_point(std::string_view text, std::size_t size, int base, std::string& out) const {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < size; ++i) {
      const int digit = i < text.size() ? digit_value(text[i]) : 99;
      if (digit >= base) fail(fmt::format("an escape in a text needs {} digits", size));
      value = value * static_cast<std::uint32_t>(base) + static_cast<std::uint32_t>(digit);
    }
    if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) fail("an escape in a text names no character");
    append_utf8(value, out);
    return size;
  }

  void symbol(std::vector<char>& open) {
    constexpr std::array<std::string_view, 26> kSymbols = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                                           "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                           ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    const auto found =
        std::ranges::find_if(kSymbols, [&](std::string_view symbol) { return rest().starts_with(symbol); });
    if (found == kSymbols.end()) fail(fmt::format("unexpected character '{}'", printable_character(rest())));
    const char c = found->front();
    if (c == '(' || c == '[' || c == '{') open.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    if (c == ')' || c == ']' || c == '}') {
      if (open.empty()) fail(fmt::format("unexpected '{}'", c));
      if (open.back() != c) fail(fmt::format("unexpected '{}': expected '{}'", c, open.back()));
      open.pop_back();
    }
    add(TokenKind::symbol, std::string(*found));
    advance(found->size());
  }

  std::string source_;
  const std::string& name_;
  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool begins_line_ = true;  // what was read last ended with a newline
};

}  // namespace

void fail_at(const std::string& name, int line, const std::string& reason) {
  throw DataError(fmt::format("{}, line {}: {}", name, line, reason));
}

std::vector<Token> tokens_of(std::string_view source, const std::string& name) {
  if (!is_utf8(source)) throw DataError(name + ": it is not valid UTF-8");
  return Lexer(source, name).run();
}

}  // namespace phalanx::jinja
