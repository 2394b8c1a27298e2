// Finds a TextPattern, a literal text or a regular expression, in a text, as the `tokenizers` package finds it.
//
// Regular expressions run through PCRE2's JIT compiler with Unicode classes; the package's engine is Oniguruma
// (oniguruma_pattern.h). A byte that is not part of a valid UTF-8 character counts as a character that is not a letter,
// number or space.
//
//   PatternFinder finder({.text = R"(\d+)", .is_regex = true});
//   PatternFinder::Scratch scratch = finder.make_scratch();
//   finder.find("a12b", scratch, [&](std::size_t begin, std::size_t end) { mark(begin, end); });  // 1, 3
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "phalanx/data/tokenizer/tokenizer_steps.h"

namespace phalanx::data {

/// One regular expression, compiled by PCRE2.
class SplitRegex {
 public:
  /// Throws DataError, with the position in the pattern, if it is not valid or not supported.
  explicit SplitRegex(const std::string& pattern);
  ~SplitRegex();
  SplitRegex(SplitRegex&&) noexcept;

  /// Memory for matching; one for each thread.
  class Scratch;
  std::shared_ptr<Scratch> make_scratch() const;

  /// Calls `match(begin, end)` for each match from left to right. An empty match that begins where the last one ended
  /// is skipped. Throws DataError if the match limit is exceeded.
  void find(std::string_view text, Scratch& scratch, const std::function<void(std::size_t, std::size_t)>& match) const;

 private:
  struct Code;
  std::string pattern_;
  std::unique_ptr<Code> code_;
};

/// Limits the growth of a text by replacements. Each of several may make a text a thousand times as long; those of a
/// real tokenizer do not. Throws DataError if the result of `given` bytes has more than `spare` + 64 times as many.
void refuse_growth(std::size_t made, std::size_t given, std::size_t spare);

class PatternFinder {
 public:
  /// Throws DataError if the pattern is empty or not valid.
  explicit PatternFinder(const TextPattern& pattern);

  using Scratch = std::shared_ptr<SplitRegex::Scratch>;  // null for a literal text
  Scratch make_scratch() const { return regex_ ? regex_->make_scratch() : nullptr; }

  template <typename F>
  void find(std::string_view text, const Scratch& scratch, F&& match) const {
    if (regex_) return regex_->find(text, *scratch, match);
    for (std::size_t at = text.find(literal_); at != text.npos; at = text.find(literal_, at + literal_.size())) {
      match(at, at + literal_.size());
    }
  }

 private:
  std::string literal_;
  std::shared_ptr<const SplitRegex> regex_;
};

}  // namespace phalanx::data
