#define PCRE2_CODE_UNIT_WIDTH 8
#include "phalanx/data/tokenizer/text_pattern.h"

#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/utf8.h"
#include "phalanx/data/tokenizer/oniguruma_pattern.h"

namespace phalanx::data {
namespace {

std::string pcre_message(int error) {
  PCRE2_UCHAR message[256];
  pcre2_get_error_message(error, message, sizeof message);
  return reinterpret_cast<const char*>(message);
}

}  // namespace

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
  const std::string translated = pcre_of_oniguruma(pattern);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_MATCH_INVALID_UTF, &error, &offset, nullptr);
  if (!code) {
    throw DataError(fmt::format("the split pattern '{}' is not valid at character {}: {}", translated, offset,
                                pcre_message(error)));
  }
  code_ = std::make_unique<Code>(code);
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // without JIT, pcre2_match() interprets
}

SplitRegex::~SplitRegex() = default;
SplitRegex::SplitRegex(SplitRegex&&) noexcept = default;

std::shared_ptr<SplitRegex::Scratch> SplitRegex::make_scratch() const { return std::make_shared<Scratch>(code_->code); }

void SplitRegex::find(std::string_view text, Scratch& scratch,
                      const std::function<void(std::size_t, std::size_t)>& match) const {
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  std::size_t last_end = std::string_view::npos;
  for (std::size_t start = 0; start <= text.size();) {
    const int found = pcre2_match(code_->code, subject, text.size(), start, 0, scratch.match, scratch.context);
    if (found == PCRE2_ERROR_NOMATCH) return;
    if (found < 0) {
      throw DataError(fmt::format("the split pattern '{}' cannot be matched: {}", pattern_, pcre_message(found)));
    }
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(scratch.match);
    const std::size_t begin = range[0], end = std::max(range[0], range[1]);
    if (begin == end) {
      if (begin != last_end) match(begin, end);
      const int length = begin < text.size() ? first_char(text.substr(begin)).length : 1;
      start = begin + static_cast<std::size_t>(std::max(1, length));
    } else {
      match(begin, end);
      start = end;
    }
    last_end = end;
  }
}

void refuse_growth(std::size_t made, std::size_t given, std::size_t spare) {
  const std::size_t most = spare + 64 * given;
  if (made <= most) return;
  throw DataError(fmt::format(
      "the tokenizer's replacements make more than {} bytes of a text of {}: expected the steps of a tokenizer", most,
      given));
}

PatternFinder::PatternFinder(const TextPattern& pattern) {
  if (pattern.text.empty()) throw DataError("the pattern is empty");
  if (pattern.is_regex) {
    regex_ = std::make_shared<const SplitRegex>(pattern.text);
  } else {
    literal_ = pattern.text;
  }
}

}  // namespace phalanx::data
