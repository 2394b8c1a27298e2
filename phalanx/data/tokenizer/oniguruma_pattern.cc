#define PCRE2_CODE_UNIT_WIDTH 8
#include "phalanx/data/tokenizer/oniguruma_pattern.h"

#include <fmt/format.h>
#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/utf8.h"

namespace phalanx::data {
namespace {

// \w inside a set: letters with marks and connectors. Outside of sets Oniguruma also includes some signs of Latin-1.
constexpr std::string_view kWordInSet = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";
constexpr std::string_view kWordBesides = "²³¹¼½¾";

// Members of a property in the package's Unicode that are missing in older versions, which PCRE2 may be built with.
constexpr std::string_view kLaterAlphabetic =
    R"(\x{363}-\x{36F}\x{C04}\x{F82}\x{F83}\x{1DD3}-\x{1DE6}\x{11080}\x{11081})";
constexpr std::string_view kLaterLowercase = R"(\x{10FC}\x{A7F2}-\x{A7F4}\x{AB69})";
constexpr std::string_view kLaterContinue = R"(\x{200C}\x{200D}\x{30FB}\x{FF65})";
constexpr std::string_view kLaterSpacingMark = R"(\x{1171E})";

bool is_hex_digit(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }
bool is_decimal_digit(char c) { return c >= '0' && c <= '9'; }
bool is_ascii_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

std::string to_utf8(std::uint32_t code_point) {
  std::string text;
  append_utf8(code_point, text);
  return text;
}

bool pcre_knows(const std::string& pattern) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP,
                                   &error, &offset, nullptr);
  pcre2_code_free(code);
  return code != nullptr;
}

/// What to add after a property of PCRE2 to get the package's; nothing if the properties differ.
std::optional<std::string_view> later_members(std::string_view plain_name) {
  struct Later {
    std::string_view name, members;
  };
  constexpr Later kLater[] = {
      {"alpha", kLaterAlphabetic},    {"alphabetic", kLaterAlphabetic}, {"lower", kLaterLowercase},
      {"lowercase", kLaterLowercase}, {"xidc", kLaterContinue},         {"xidcontinue", kLaterContinue},
      {"idc", kLaterContinue},        {"idcontinue", kLaterContinue},   {"mc", kLaterSpacingMark}};
  for (const auto& [name, members] : kLater) {
    if (name == plain_name) return members;
  }
  // PCRE2's own properties, and those that newer versions of Unicode have changed.
  constexpr std::string_view kOther[] = {"xan",    "xwd",
                                         "xsp",    "xps",
                                         "xuc",    "cased",
                                         "ci",     "caseignorable",
                                         "cwcm",   "changeswhencasemapped",
                                         "cwt",    "changeswhentitlecased",
                                         "cwu",    "changeswhenuppercased",
                                         "dia",    "diacritic",
                                         "ext",    "extender",
                                         "grbase", "graphemebase",
                                         "grext",  "graphemeextend",
                                         "sterm",  "sentenceterminal",
                                         "term",   "terminalpunctuation"};
  if (std::ranges::find(kOther, plain_name) != std::end(kOther)) return std::nullopt;
  // Bidirectional classes exist only in PCRE2, except one property.
  if (plain_name.starts_with("bidi") && plain_name != "bidic" && plain_name != "bidicontrol") return std::nullopt;
  return "";
}

/// The case folding of `code_point`: several characters for ß (ss), ﬁ and about a hundred others.
std::u32string folded(std::uint32_t code_point) {
  std::array<utf8proc_int32_t, 8> out{};
  int boundary = 0;
  const auto length = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code_point), out.data(), out.size(),
                                              UTF8PROC_CASEFOLD, &boundary);
  if (length < 1 || length > static_cast<utf8proc_ssize_t>(out.size())) return {static_cast<char32_t>(code_point)};
  return {out.begin(), out.begin() + length};
}

/// The characters that fold to several, ascending, with their folding.
struct LongFold {
  std::uint32_t from;
  std::u32string to;
};
const std::vector<LongFold>& long_folds() {
  static const std::vector<LongFold> found = [] {
    std::vector<LongFold> out;
    for (std::uint32_t c = 0x80; c < 0x10000; ++c) {
      if (c >= 0xD800 && c < 0xE000) continue;
      if (std::u32string to = folded(c); to.size() > 1) out.push_back({c, std::move(to)});
    }
    return out;
  }();
  return found;
}

/// The effect of (?i) on a class in a set: folding adds nothing, or it adds nothing in a negated set, or the class must
/// be refused.
enum class Folding { none, none_if_negated, some };

Folding folding_of(std::string_view plain_name) {
  constexpr std::string_view kNone[] = {"n",        "nd",       "nl",     "no",    "p",         "pc", "pd",  "pe",
                                        "pf",       "pi",       "po",     "ps",    "s",         "sc", "sk",  "sm",
                                        "so",       "z",        "zl",     "zp",    "zs",        "cc", "han", "hani",
                                        "hiragana", "katakana", "hangul", "space", "whitespace"};
  if (std::ranges::find(kNone, plain_name) != std::end(kNone)) return Folding::none;
  return plain_name == "l" || plain_name == "alpha" || plain_name == "alphabetic" ? Folding::none_if_negated
                                                                                  : Folding::some;
}

class PatternTranslator {
 public:
  explicit PatternTranslator(const std::string& pattern) : in_(pattern) {}

  std::string translate() {
    while (!at_end()) step();
    end_literals();
    out_.append(open_options_, ')');
    return std::move(out_);
  }

 private:
  static constexpr std::size_t kNone = std::string::npos;
  struct Group {
    std::size_t begin;            // in out_
    std::size_t options_outside;  // of the enclosing group
    bool ignored_case;            // of the enclosing group
    bool is_plain;                // (?:...), which Oniguruma joins with the text around it
    bool is_lookaround;
  };
  static constexpr const char* kOwnCase =
      "where case is ignored it finds other characters, or another number of them, in the `tokenizers` package; put "
      "(?-i:...) around it and write out the cases that it is to find";

  [[noreturn]] void refuse(const std::string& what, const std::string& hint = {}) const {
    throw DataError(fmt::format("the split pattern '{}' holds '{}', which is not supported{}{}", in_, what,
                                hint.empty() ? "" : ": ", hint));
  }

  /// A character under (?i). Oniguruma also reads "ss" as ß, and ß as "ss"; PCRE2 does not.
  void literal(std::uint32_t code_point) {
    if (!ignores_case_) return end_literals();
    const std::u32string to = folded(code_point);
    if (to.size() > 1) refuse(to_utf8(code_point), kOwnCase);
    literals_.push_back(to[0]);
    is_after_literal_ = true;
  }

  void end_literals() {
    is_after_literal_ = false;
    if (literals_.size() > 1) {
      for (const auto& [from, to] : long_folds()) {
        if (literals_.find(to) == std::u32string::npos) continue;
        std::string text;
        for (const char32_t c : to) text += to_utf8(c);
        refuse(text, fmt::format("where case is ignored it stands for '{}' as well; put (?-i:...) around it, or write "
                                 "each letter as a set of its own, [sS]",
                                 to_utf8(from)));
      }
    }
    literals_.clear();
  }

  /// A character of a set or, after a minus, the last of a range.
  void set_member(std::uint32_t code_point) {
    const std::uint32_t first = in_range_ ? *range_begin_ : code_point;
    if (ignores_case_) {
      for (const LongFold& fold : long_folds()) {
        if (fold.from >= first && fold.from <= code_point)
          refuse(to_utf8(fold.from) + " in a set under (?i)", kOwnCase);
      }
    }
    range_begin_ = in_range_ ? std::nullopt : std::optional(code_point);
    in_range_ = false;
  }

  void set_class(Folding folding, const std::string& what) {
    range_begin_.reset();
    in_range_ = false;
    if (!ignores_case_ || folding == Folding::none || (folding == Folding::none_if_negated && is_negated_)) return;
    refuse(what + " in a set under (?i)", kOwnCase);
  }

  /// Appends the character that begins here. Returns its code point; nothing for a byte that is not part of a
  /// character.
  std::optional<std::uint32_t> take_char() {
    const Utf8Char c = first_char(std::string_view(in_).substr(at_));
    const std::size_t length = c.length > 0 ? static_cast<std::size_t>(c.length) : 1;
    out_.append(in_, at_, length);
    at_ += length;
    return c.length > 0 ? std::optional(c.code_point) : std::nullopt;
  }

  static constexpr const char* kAfterAnchor =
      "a quantifier after a lookaround or an anchor, as it is in the `tokenizers` package";

  bool at_end() const { return at_ >= in_.size(); }
  char peek(std::size_t ahead = 0) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
  bool starts_with(std::string_view text) const { return std::string_view(in_).substr(at_).starts_with(text); }

  void step() {
    const char c = peek();
    if (c == '\\') {
      begin_atom();
      is_anchor_ = std::string_view("AbBGzZ").find(peek(1)) != std::string_view::npos && peek(1) != '\0';
      escape(false);
    } else if (c == '[') {
      begin_atom();
      end_literals();
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
    } else if (c == '|') {
      begin_atom();
      end_literals();
      atom_ = kNone;
      if (!groups_.empty()) groups_.back().is_plain = false;
      out_ += in_[at_++];
    } else {
      begin_atom();
      const auto code_point = take_char();
      if (code_point && c != '.' && c != '^' && c != '$') {
        literal(*code_point);
      } else {
        end_literals();
        is_anchor_ = c == '^' || c == '$';
      }
    }
  }

  void begin_atom() {
    atom_ = out_.size();
    is_quantified_ = false;
    is_anchor_ = false;
  }

  /// Appends a quantifier. A second one applies to everything that the first has made.
  void quantify(const std::string& quantifier, bool may_be_lazy, bool may_be_possessive) {
    if (is_anchor_) refuse(quantifier, kAfterAnchor);
    if (is_after_literal_ && quantifier != "{1}") literals_.pop_back();  // it applies only to that character
    if (quantifier != "{1}") end_literals();
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
      end_literals();
      out_ += "\\{";
      ++at_;
      return;
    }
    const std::string text = in_.substr(at_, at + 1 - at_);
    constexpr std::size_t kMaxDigits = 5;  // PCRE2 reports an error for five
    if (low.size() > kMaxDigits || high.size() > kMaxDigits) refuse(text);
    if (!low.empty() && !high.empty() && std::stoi(low) > std::stoi(high)) refuse(text);
    at_ = at + 1;
    quantify(fmt::format("{{{}{}{}}}", low.empty() ? "0" : low, has_comma ? "," : "", high), has_comma, false);
  }

  void open_group() {
    const std::size_t begin = out_.size();
    if (starts_with("(*")) refuse("(*");
    if (!starts_with("(?")) {
      ++at_;
      return push_group(begin, "(", ignores_case_);
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
      return push_group(begin, header, ignores_case_);
    }
    if (starts_with("(?<")) {  // a name
      const std::size_t end = in_.find('>', at_);
      if (end == kNone) refuse("(?<");
      const std::string header = in_.substr(at_, end + 1 - at_);
      at_ = end + 1;
      return push_group(begin, header, ignores_case_);
    }
    options(begin);
  }

  void push_group(std::size_t begin, std::string_view header, bool ignores_case) {
    out_ += header;
    is_after_literal_ = false;
    if (header != "(?:") end_literals();
    const bool is_lookaround = header.size() > 2 && (header.ends_with('=') || header.ends_with('!'));
    groups_.push_back({begin, open_options_, ignores_case_, header == "(?:", is_lookaround});
    ignores_case_ = ignores_case;
    open_options_ = 0;
    atom_ = kNone;
    is_quantified_ = is_anchor_ = false;
  }

  /// "(?i:", or "(?i)", which holds to the end of the enclosing group.
  void options(std::size_t begin) {
    std::string flags;
    bool ignores_case = ignores_case_, is_on = true;
    std::size_t at = at_ + 2;
    for (; at < in_.size() && in_[at] != ':' && in_[at] != ')'; ++at) {
      const char c = in_[at];
      if (c != 'i' && c != 'm' && c != '-') refuse(in_.substr(at_, at + 1 - at_));
      flags += c == 'm' ? 's' : c;  // Ruby's m: the dot matches a newline
      if (c == '-') is_on = false;
      if (c == 'i') ignores_case = is_on;
    }
    if (at >= in_.size()) refuse(in_.substr(at_));
    at_ = at + 1;
    const std::string header = "(?" + flags + ":";
    end_literals();
    if (in_[at] == ':') return push_group(begin, header, ignores_case);
    ignores_case_ = ignores_case;
    out_ += header;
    ++open_options_;
    atom_ = kNone;
    is_quantified_ = is_anchor_ = false;
  }

  void close_group() {
    ++at_;
    out_.append(open_options_, ')');
    out_ += ')';
    open_options_ = 0;
    is_quantified_ = is_anchor_ = false;
    atom_ = kNone;
    is_after_literal_ = false;
    if (groups_.empty()) return;  // PCRE2 reports that it was never opened
    if (!groups_.back().is_plain) end_literals();
    ignores_case_ = groups_.back().ignored_case;
    is_anchor_ = groups_.back().is_lookaround;
    atom_ = groups_.back().begin;
    open_options_ = groups_.back().options_outside;
    groups_.pop_back();
  }

  void set() {
    out_ += in_[at_++];
    range_begin_.reset();
    in_range_ = false;
    is_negated_ = peek() == '^';
    if (is_negated_) out_ += in_[at_++];
    if (peek() == ']') {  // a first ] is text
      out_ += "\\]";
      ++at_;
      set_member(']');
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
      } else if (peek() == '-' && range_begin_ && !in_range_) {
        in_range_ = peek(1) != ']';
        out_ += in_[at_++];
      } else if (const auto code_point = take_char()) {
        set_member(*code_point);
      }
    }
    if (at_end()) return;  // PCRE2 reports that it is not closed
    out_ += in_[at_++];
  }

  /// "[:alpha:]", which is not limited to ASCII here.
  void bracket() {
    const std::size_t end = in_.find(":]", at_ + 2);
    const std::string name = in_.substr(at_, end == kNone ? 2 : end + 2 - at_);
    struct Class {
      std::string_view name, positive, later;
      Folding folding;
    };
    constexpr Class kClasses[] = {
        {"[:alpha:]", R"(\p{Alphabetic})", kLaterAlphabetic, Folding::none_if_negated},
        {"[:digit:]", R"(\p{Nd})", "", Folding::none},
        {"[:space:]", R"(\p{White_Space})", "", Folding::none},
        {"[:upper:]", R"(\p{Uppercase})", "", Folding::some},
        {"[:lower:]", R"(\p{Lowercase})", kLaterLowercase, Folding::some},
        {"[:word:]", kWordInSet, "", Folding::none_if_negated},
    };
    for (const auto& [known, positive, later, folding] : kClasses) {
      if (name != known) continue;
      set_class(folding, name);
      out_.append(positive).append(later);
      at_ += name.size();
      return;
    }
    refuse(name);
  }

  void escape(bool in_set) {
    if (at_ + 1 >= in_.size()) {  // PCRE2 reports that it ends too early
      out_ += in_[at_++];
      return;
    }
    const char c = peek(1);
    const std::string text = in_.substr(at_, 2);
    at_ += 2;
    if (!in_set && c != 'x' && c != 'u' && (c & 0x80) == 0) end_literals();
    if ((c & 0x80) != 0) {  // such a character is literal
      at_ -= 1;
      if (const auto code_point = take_char()) in_set ? set_member(*code_point) : literal(*code_point);
    } else if (c == 'w' || (c == 'W' && !in_set)) {
      if (in_set) {
        set_class(Folding::none_if_negated, text);
        out_ += kWordInSet;
      } else {
        out_.append(c == 'w' ? "[" : "[^").append(kWordInSet).append(kWordBesides) += ']';
      }
    } else if (c == 's') {
      set_class_if(in_set, Folding::none, text);
      out_ += R"(\p{White_Space})";  // because in some versions of PCRE2 \s includes U+180E
    } else if (c == 'S') {
      set_class_if(in_set, Folding::none_if_negated, text);
      out_ += R"(\P{White_Space})";
    } else if (c == 'v') {
      if (in_set) set_member('\v');
      out_ += R"(\x{0B})";
    } else if (c == 'p' || c == 'P') {
      property(c, in_set);
    } else if (c == 'x' || c == 'u') {
      code_point(c, in_set);
    } else if (is_ascii_letter(c) || is_decimal_digit(c)) {
      constexpr std::string_view kSame = "dDtnrfae", kSameOutside = "AzZ123456789k";
      if (kSame.find(c) == kNone && (in_set || kSameOutside.find(c) == kNone)) refuse(text);
      if (ignores_case_ && (is_decimal_digit(c) || c == 'k')) refuse(text + " under (?i)", kOwnCase);
      if (c == 'd' || c == 'D') set_class_if(in_set, c == 'd' ? Folding::none : Folding::none_if_negated, text);
      constexpr std::string_view kControls = "tnrfae", kMeant = "\t\n\r\f\a\x1B";
      if (const auto at = kControls.find(c); in_set && at != kNone) set_member(static_cast<unsigned char>(kMeant[at]));
      out_ += text;
    } else {
      if (in_set) set_member(static_cast<unsigned char>(c));
      out_ += text;
    }
  }

  void set_class_if(bool in_set, Folding folding, const std::string& what) {
    if (in_set) set_class(folding, what);
  }

  void property(char p, bool in_set) {
    const std::size_t end = in_.find('}', at_);
    if (peek() != '{' || end == kNone) refuse(fmt::format("\\{}", p));
    std::string name = in_.substr(at_ + 1, end - at_ - 1);
    const std::string text = fmt::format("\\{}{{{}}}", p, name);
    at_ = end + 1;
    bool negated = p == 'P';
    if (name.starts_with('^')) {
      name.erase(0, 1);
      negated = !negated;
    }
    std::string plain;
    for (const char c : name) {
      if (is_ascii_letter(c)) plain += static_cast<char>(c | 0x20);
      if (is_decimal_digit(c)) plain += c;
      if (!is_ascii_letter(c) && !is_decimal_digit(c) && c != ' ' && c != '_' && c != '-') {
        refuse(text, "the `tokenizers` package does not know it; a script is \\p{Han}");
      }
    }
    const auto later = later_members(plain);
    // In PCRE2 the name of a script alone means its script extensions.
    const bool is_script = pcre_knows("\\p{sc:" + name + "}");
    if (!later || (!is_script && !pcre_knows("\\p{" + name + "}"))) {
      refuse(text,
             "the property is unknown or has other members in the `tokenizers` package; write out what it is to "
             "find, by ranges or categories such as \\p{L}");
    }
    if (is_script) name.insert(0, "sc:");
    if (in_set) {
      Folding folding = folding_of(plain);
      if (negated && folding == Folding::none) folding = Folding::none_if_negated;
      set_class(folding, text);
      if (negated && !later->empty()) refuse(text + " in a set", "write [^...] or (?!...) with the property itself");
    }
    std::string of_pcre = fmt::format("\\{}{{{}}}", negated && later->empty() ? 'P' : 'p', name);
    if (!later->empty()) of_pcre += *later;
    if (in_set) {
      if (ignores_case_ && plain == "l") of_pcre += negated ? "" : R"(\x{345})";  // an iota with its own capital
      out_ += of_pcre;
    } else if (!later->empty()) {
      out_.append(negated ? "[^" : "[").append(of_pcre) += ']';
    } else {
      out_ += ignores_case_ ? "(?-i:" + of_pcre + ")" : of_pcre;  // \p{Lu} still matches only capitals
    }
  }

  /// "\x{1F600}", "\x41", "\u3042".
  void code_point(char kind, bool in_set) {
    std::string digits;
    if (kind == 'x' && peek() == '{') {
      const std::size_t end = in_.find('}', at_);
      digits = in_.substr(at_ + 1, end == kNone ? 0 : end - at_ - 1);
      at_ = end == kNone ? in_.size() : end + 1;
    } else {
      const std::size_t most = kind == 'x' ? 2 : 4;
      while (digits.size() < most && is_hex_digit(peek())) digits += in_[at_++];
      if (kind == 'u' && digits.size() < most) refuse("\\u" + digits);
      // There it is a byte: for a character of several bytes it is not the code point.
      if (kind == 'x' && digits.size() == 2 && digits[0] >= '8') refuse("\\x" + digits);
    }
    constexpr std::size_t kMaxDigits = 8;
    if (digits.empty() || digits.size() > kMaxDigits || !std::ranges::all_of(digits, is_hex_digit)) {
      refuse(fmt::format("\\{}{}", kind, digits));
    }
    out_ += fmt::format("\\x{{{}}}", digits);
    const auto value = static_cast<std::uint32_t>(std::stoul(digits, nullptr, 16));
    in_set ? set_member(value) : literal(value);
  }

  const std::string& in_;
  std::size_t at_ = 0;
  std::string out_;
  std::size_t atom_ = kNone;  // start in out_ of what a quantifier would apply to
  bool is_quantified_ = false;
  bool is_anchor_ = false;  // a quantifier would apply to an anchor, which matches no text
  std::vector<Group> groups_;
  std::size_t open_options_ = 0;  // groups that (?i) has opened in the current group
  bool ignores_case_ = false;
  std::u32string literals_;  // under (?i): the folded literals that are one string to Oniguruma
  bool is_after_literal_ = false;
  std::optional<std::uint32_t> range_begin_;  // in a set: the previous character, which a minus may turn into a range
  bool in_range_ = false;
  bool is_negated_ = false;  // of the current set
};

}  // namespace

std::string pcre_of_oniguruma(const std::string& pattern) { return PatternTranslator(pattern).translate(); }

}  // namespace phalanx::data
