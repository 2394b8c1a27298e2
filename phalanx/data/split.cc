#define PCRE2_CODE_UNIT_WIDTH 8
#include "phalanx/data/split.h"

#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/data/unicode.h"

namespace phalanx::data {
namespace {

/// What a byte says about the character that begins with it.
enum class ByteClass : std::uint8_t { other, letter, number, space, several };

constexpr std::array<ByteClass, 256> make_byte_classes() {
  std::array<ByteClass, 256> table{};
  for (int c = 0; c < 256; ++c) {
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) table[c] = ByteClass::letter;
    if (c >= '0' && c <= '9') table[c] = ByteClass::number;
    if (c == ' ' || (c >= '\t' && c <= '\r')) table[c] = ByteClass::space;
    if (c >= 0x80) table[c] = ByteClass::several;
  }
  return table;
}

constexpr std::array<ByteClass, 256> kByteClasses = make_byte_classes();

ByteClass byte_class(char byte) { return kByteClasses[static_cast<unsigned char>(byte)]; }

struct ClassedChar {
  ByteClass value;
  std::size_t length;
};

/// The character at `at`, of any length; an invalid byte is a character of class other.
ClassedChar char_at(const char* at, const char* end) {
  const ByteClass quick = byte_class(*at);
  if (quick != ByteClass::several) return {quick, 1};
  const Utf8Char c = first_char({at, static_cast<std::size_t>(end - at)});
  if (c.length == 0) return {ByteClass::other, 1};
  constexpr ByteClass kSame[] = {ByteClass::other, ByteClass::letter, ByteClass::number, ByteClass::space};
  return {kSame[static_cast<int>(class_of(c.code_point))], static_cast<std::size_t>(c.length)};
}

/// End of the run of characters of class `wanted` that begins at `at`.
const char* run_end(const char* at, const char* end, ByteClass wanted) {
  while (at < end) {
    const ByteClass quick = byte_class(*at);
    if (quick == wanted) {
      ++at;
    } else if (quick == ByteClass::several) {
      const ClassedChar c = char_at(at, end);
      if (c.value != wanted) break;
      at += c.length;
    } else {
      break;
    }
  }
  return at;
}

std::size_t contraction(const char* at, const char* end) {
  if (end - at < 2) return 0;
  const char a = at[1];
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
  if (end - at < 3) return 0;
  const char b = at[2];
  return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

}  // namespace

std::size_t gpt2_piece(std::string_view text) {
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  if (*begin == '\'') {
    if (const std::size_t length = contraction(begin, end)) return length;
  }
  ClassedChar first = char_at(begin, end);
  const char* at = begin;
  if (*begin == ' ' && text.size() > 1) {  // a space goes with the letters, digits or signs after it
    const ClassedChar second = char_at(begin + 1, end);
    if (second.value != ByteClass::space) {
      first = second;
      at = begin + 1;
    }
  }
  at += first.length;
  if (first.value != ByteClass::space) return static_cast<std::size_t>(run_end(at, end, first.value) - begin);
  // A run of spaces leaves its last one to what follows, unless it is alone or nothing follows.
  const char* last = begin;
  while (at < end) {
    const ClassedChar next = char_at(at, end);
    if (next.value != ByteClass::space) return static_cast<std::size_t>((last == begin ? at : last) - begin);
    last = at;
    at += next.length;
  }
  return text.size();
}

struct SplitRegex::Code {
  explicit Code(pcre2_code* made) : code(made) {}
  ~Code() { pcre2_code_free(code); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  pcre2_code* code;
};

class SplitRegex::Scratch {
 public:
  explicit Scratch(const pcre2_code* code)
      : match(pcre2_match_data_create_from_pattern(code, nullptr)), context(pcre2_match_context_create(nullptr)) {
    stack = pcre2_jit_stack_create(32 << 10, 16 << 20, nullptr);
    if (stack) pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Scratch() {
    pcre2_match_data_free(match);
    pcre2_match_context_free(context);
    if (stack) pcre2_jit_stack_free(stack);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  pcre2_match_data* match;
  pcre2_match_context* context;
  pcre2_jit_stack* stack = nullptr;
};

SplitRegex::SplitRegex(const std::string& pattern) : pattern_(pattern) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF, &error, &offset, nullptr);
  if (!code) {
    PCRE2_UCHAR message[256];
    pcre2_get_error_message(error, message, sizeof message);
    throw DataError(fmt::format("the split pattern '{}' is not valid at character {}: {}", pattern, offset,
                                reinterpret_cast<const char*>(message)));
  }
  code_ = std::make_unique<Code>(code);
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where there is no JIT, pcre2_match() interprets
}

SplitRegex::~SplitRegex() = default;
SplitRegex::SplitRegex(SplitRegex&&) noexcept = default;

std::shared_ptr<SplitRegex::Scratch> SplitRegex::make_scratch() const { return std::make_shared<Scratch>(code_->code); }

void SplitRegex::split(std::string_view text, Scratch& scratch,
                       const std::function<void(std::string_view)>& piece) const {
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  std::size_t done = 0;   // text before this has been given out
  std::size_t start = 0;  // where to look for the next match
  while (start < text.size()) {
    const int found = pcre2_match(code_->code, subject, text.size(), start, 0, scratch.match, scratch.context);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) {
      PCRE2_UCHAR message[256];
      pcre2_get_error_message(found, message, sizeof message);
      throw DataError(fmt::format("the split pattern '{}' cannot be matched: {}", pattern_,
                                  reinterpret_cast<const char*>(message)));
    }
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(scratch.match);
    const std::size_t begin = range[0], end = range[1];
    if (end <= begin) {  // an empty match cuts nothing: go on behind the next character
      const auto length = begin < text.size() ? first_char(text.substr(begin)).length : 1;
      start = begin + static_cast<std::size_t>(std::max(1, length));
      continue;
    }
    if (begin > done) piece(text.substr(done, begin - done));
    piece(text.substr(begin, end - begin));
    done = start = end;
  }
  if (done < text.size()) piece(text.substr(done));
}

Splitter::Splitter(const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    regexes_.push_back(pattern == kGpt2Pattern ? nullptr : std::make_shared<const SplitRegex>(pattern));
  }
}

Splitter::Scratch Splitter::make_scratch() const {
  Scratch scratch;
  for (const auto& regex : regexes_) scratch.regexes.push_back(regex ? regex->make_scratch() : nullptr);
  return scratch;
}

void Splitter::split_from(std::size_t pattern, std::string_view text, Scratch& scratch,
                          const std::function<void(std::string_view)>& piece) const {
  if (text.empty()) return;
  if (pattern == regexes_.size()) return piece(text);
  if (const auto& regex = regexes_[pattern]) {
    regex->split(text, *scratch.regexes[pattern],
                 [&](std::string_view part) { split_from(pattern + 1, part, scratch, piece); });
    return;
  }
  while (!text.empty()) {
    const std::size_t length = gpt2_piece(text);
    split_from(pattern + 1, text.substr(0, length), scratch, piece);
    text.remove_prefix(length);
  }
}

}  // namespace phalanx::data
