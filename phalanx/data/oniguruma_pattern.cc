#define PCRE2_CODE_UNIT_WIDTH 8
#include "phalanx/data/oniguruma_pattern.h"

#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx::data {
namespace {

// What \w is: letters with marks, connectors and the signs of Latin-1 that Oniguruma counts in.
constexpr std::string_view kWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}²³¹¼½¾)";

bool is_hex_digit(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }
bool is_decimal_digit(char c) { return c >= '0' && c <= '9'; }
bool is_ascii_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

bool pcre_knows(const std::string& pattern) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP,
                                   &error, &offset, nullptr);
  pcre2_code_free(code);
  return code != nullptr;
}

class PatternTranslator {
 public:
  explicit PatternTranslator(const std::string& pattern) : in_(pattern) {}

  std::string translate() {
    while (!at_end()) step();
    out_.append(open_options_, ')');
    return std::move(out_);
  }

 private:
  static constexpr std::size_t kNone = std::string::npos;
  struct Group {
    std::size_t begin;            // in out_
    std::size_t options_outside;  // of the group around it
  };

  [[noreturn]] void refuse(const std::string& what) const {
    throw DataError(fmt::format("the split pattern '{}' holds '{}', which is not supported", in_, what));
  }

  bool at_end() const { return at_ >= in_.size(); }
  char peek(std::size_t ahead = 0) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
  bool starts_with(std::string_view text) const { return std::string_view(in_).substr(at_).starts_with(text); }

  void step() {
    const char c = peek();
    if (c == '\\') {
      begin_atom();
      escape(false);
    } else if (c == '[') {
      begin_atom();
      set();
    } else if (c == '(') {
      open_group();
    } else if (c == ')') {
      close_group();
    } else if (c == '*' || c == '+' || c == '?') {
      ++at_;
      quantify(std::string(1, c), true, true);
    } else if (c == '{') {
      interval();
    } else if ((static_cast<unsigned char>(c) & 0xC0) == 0x80) {  // goes on with a character
      out_ += in_[at_++];
    } else {
      begin_atom();
      if (c == '|') atom_ = kNone;
      out_ += in_[at_++];
    }
  }

  void begin_atom() {
    atom_ = out_.size();
    is_quantified_ = false;
  }

  /// Appends a quantifier; a second one is about all that the first has made.
  void quantify(const std::string& quantifier, bool may_be_lazy, bool may_be_possessive) {
    if (is_quantified_ && atom_ != kNone) {
      out_.insert(atom_, "(?:");
      out_ += ')';
    }
    out_ += quantifier;
    if ((may_be_lazy && peek() == '?') || (may_be_possessive && peek() == '+')) out_ += in_[at_++];
    is_quantified_ = true;
  }

  /// "{2,3}", never possessive; "{2}", never lazy either; or a brace that is text.
  void interval() {
    std::size_t at = at_ + 1;
    const auto number = [&] {
      std::string digits;
      while (at < in_.size() && is_decimal_digit(in_[at])) digits += in_[at++];
      return digits;
    };
    const std::string low = number();
    const bool has_comma = at < in_.size() && in_[at] == ',';
    if (has_comma) ++at;
    const std::string high = has_comma ? number() : "";
    const bool is_interval = at < in_.size() && in_[at] == '}' && !(low.empty() && high.empty());
    if (!is_interval) {
      begin_atom();
      out_ += "\\{";
      ++at_;
      return;
    }
    const std::string text = in_.substr(at_, at + 1 - at_);
    constexpr std::size_t kMostDigits = 5;  // PCRE2 says what is wrong with five
    if (low.size() > kMostDigits || high.size() > kMostDigits) refuse(text);
    if (!low.empty() && !high.empty() && std::stoi(low) > std::stoi(high)) refuse(text);
    at_ = at + 1;
    quantify(fmt::format("{{{}{}{}}}", low.empty() ? "0" : low, has_comma ? "," : "", high), has_comma, false);
  }

  void open_group() {
    const std::size_t begin = out_.size();
    if (starts_with("(*")) refuse("(*");
    if (!starts_with("(?")) {
      ++at_;
      return push_group(begin, "(");
    }
    if (starts_with("(?#")) {
      const std::size_t end = in_.find(')', at_);
      if (end == kNone) refuse("(?#");
      at_ = end + 1;
      return;
    }
    for (const std::string_view header : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!"}) {
      if (!starts_with(header)) continue;
      at_ += header.size();
      return push_group(begin, header);
    }
    if (starts_with("(?<")) {  // a name
      const std::size_t end = in_.find('>', at_);
      if (end == kNone) refuse("(?<");
      const std::string header = in_.substr(at_, end + 1 - at_);
      at_ = end + 1;
      return push_group(begin, header);
    }
    options(begin);
  }

  void push_group(std::size_t begin, std::string_view header) {
    out_ += header;
    groups_.push_back({begin, open_options_});
    open_options_ = 0;
    atom_ = kNone;
    is_quantified_ = false;
  }

  /// "(?i:", or "(?i)", which holds to the end of the group around it.
  void options(std::size_t begin) {
    std::string flags;
    std::size_t at = at_ + 2;
    for (; at < in_.size() && in_[at] != ':' && in_[at] != ')'; ++at) {
      const char c = in_[at];
      if (c != 'i' && c != 'm' && c != '-') refuse(in_.substr(at_, at + 1 - at_));
      flags += c == 'm' ? 's' : c;  // Ruby's m: the dot matches a newline
    }
    if (at >= in_.size()) refuse(in_.substr(at_));
    at_ = at + 1;
    const std::string header = "(?" + flags + ":";
    if (in_[at] == ':') return push_group(begin, header);
    out_ += header;
    ++open_options_;
    atom_ = kNone;
    is_quantified_ = false;
  }

  void close_group() {
    ++at_;
    out_.append(open_options_, ')');
    out_ += ')';
    open_options_ = 0;
    is_quantified_ = false;
    atom_ = kNone;
    if (groups_.empty()) return;  // PCRE2 says that it was never opened
    atom_ = groups_.back().begin;
    open_options_ = groups_.back().options_outside;
    groups_.pop_back();
  }

  void set() {
    out_ += in_[at_++];
    if (peek() == '^') out_ += in_[at_++];
    if (peek() == ']') {  // the first is text
      out_ += "\\]";
      ++at_;
    }
    while (!at_end() && peek() != ']') {
      if (peek() == '\\') {
        escape(true);
      } else if (starts_with("[:")) {
        bracket();
      } else if (peek() == '[') {
        refuse("[ in a set");
      } else if (starts_with("&&")) {
        refuse("&& in a set");
      } else {
        out_ += in_[at_++];
      }
    }
    if (at_end()) return;  // PCRE2 says that it is not closed
    out_ += in_[at_++];
  }

  /// "[:alpha:]", which knows no ASCII here.
  void bracket() {
    const std::size_t end = in_.find(":]", at_ + 2);
    const std::string name = in_.substr(at_, end == kNone ? 2 : end + 2 - at_);
    struct Class {
      std::string_view name, positive;
    };
    constexpr Class kClasses[] = {{"[:alpha:]", R"(\p{Alphabetic})"},  {"[:digit:]", R"(\p{Nd})"},
                                  {"[:space:]", R"(\p{White_Space})"}, {"[:upper:]", R"(\p{Uppercase})"},
                                  {"[:lower:]", R"(\p{Lowercase})"},   {"[:word:]", kWord}};
    for (const auto& [known, positive] : kClasses) {
      if (name != known) continue;
      out_ += positive;
      at_ += name.size();
      return;
    }
    refuse(name);
  }

  void escape(bool in_set) {
    if (at_ + 1 >= in_.size()) {  // PCRE2 says that it ends too early
      out_ += in_[at_++];
      return;
    }
    const char c = peek(1);
    const std::string text = in_.substr(at_, 2);
    at_ += 2;
    if (c == 'w' || (c == 'W' && !in_set)) {
      out_.append(in_set ? "" : c == 'w' ? "[" : "[^").append(kWord).append(in_set ? "" : "]");
    } else if (c == 's') {
      out_ += R"(\p{White_Space})";  // where PCRE2's \s still counts U+180E
    } else if (c == 'S') {
      out_ += R"(\P{White_Space})";
    } else if (c == 'v') {
      out_ += R"(\x{0B})";
    } else if (c == 'p' || c == 'P') {
      property(c);
    } else if (c == 'x' || c == 'u') {
      code_point(c);
    } else if (is_ascii_letter(c) || is_decimal_digit(c)) {
      constexpr std::string_view kSame = "dDtnrfae", kSameOutside = "AzZ123456789k";
      if (kSame.find(c) == kNone && (in_set || kSameOutside.find(c) == kNone)) refuse(text);
      out_ += text;
    } else {
      out_ += text;
    }
  }

  void property(char p) {
    const std::size_t end = in_.find('}', at_);
    if (peek() != '{' || end == kNone) refuse(fmt::format("\\{}", p));
    std::string name = in_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    bool negated = p == 'P';
    if (name.starts_with('^')) {
      name.erase(0, 1);
      negated = !negated;
    }
    // A script's name alone is of the scripts' extensions in PCRE2.
    if (pcre_knows("\\p{sc:" + name + "}")) name.insert(0, "sc:");
    out_ += fmt::format("\\{}{{{}}}", negated ? 'P' : 'p', name);
  }

  /// "\x{1F600}", "\x41", "\u3042".
  void code_point(char kind) {
    std::string digits;
    if (kind == 'x' && peek() == '{') {
      const std::size_t end = in_.find('}', at_);
      digits = in_.substr(at_ + 1, end == kNone ? 0 : end - at_ - 1);
      at_ = end == kNone ? in_.size() : end + 1;
    } else {
      const std::size_t most = kind == 'x' ? 2 : 4;
      while (digits.size() < most && is_hex_digit(peek())) digits += in_[at_++];
      if (kind == 'u' && digits.size() < most) refuse("\\u" + digits);
      // A byte, there: of a character of several it is not the code point.
      if (kind == 'x' && digits.size() == 2 && digits[0] >= '8') refuse("\\x" + digits);
    }
    constexpr std::size_t kMostDigits = 8;
    if (digits.empty() || digits.size() > kMostDigits || !std::ranges::all_of(digits, is_hex_digit)) {
      refuse(fmt::format("\\{}{}", kind, digits));
    }
    out_ += fmt::format("\\x{{{}}}", digits);
  }

  const std::string& in_;
  std::size_t at_ = 0;
  std::string out_;
  std::size_t atom_ = kNone;  // where in out_ begins what a quantifier would be about
  bool is_quantified_ = false;
  std::vector<Group> groups_;
  std::size_t open_options_ = 0;  // groups that (?i) has opened in the group under way
};

}  // namespace

std::string pcre_of_oniguruma(const std::string& pattern) { return PatternTranslator(pattern).translate(); }

}  // namespace phalanx::data
