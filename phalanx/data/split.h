// Splitting a text into the pieces that byte-pair merges never cross.
//
// A Splitter applies a list of regular expressions one after another: each cuts every piece so far into its matches and
// what lies between them. The usual pattern, GPT-2's, has a hand-written matcher of the same meaning, about ten times
// faster than the regular expression; all others run through PCRE2's JIT compiler with Unicode classes. A byte that is
// part of no valid UTF-8 character counts as a character that is no letter, number or space.
//
//   Splitter splitter({std::string(kGpt2Pattern)});
//   Splitter::Scratch scratch = splitter.make_scratch();
//   splitter.split(text, scratch, [&](std::string_view piece) { ... });  // in order; together they are the text
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx::data {

inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// Bytes of the piece that kGpt2Pattern matches at the start of `text`, which must not be empty.
std::size_t gpt2_piece(std::string_view text);

/// One regular expression, compiled by PCRE2.
class SplitRegex {
 public:
  /// DataError, with the place in the pattern, where it is not valid.
  explicit SplitRegex(const std::string& pattern);
  ~SplitRegex();
  SplitRegex(SplitRegex&&) noexcept;

  /// What a thread needs for itself to match.
  class Scratch;
  std::shared_ptr<Scratch> make_scratch() const;

  /// Calls `piece` for each match and each stretch between matches. DataError where the match limit is exceeded.
  void split(std::string_view text, Scratch& scratch, const std::function<void(std::string_view)>& piece) const;

 private:
  struct Code;
  std::string pattern_;
  std::unique_ptr<Code> code_;
};

class Splitter {
 public:
  explicit Splitter(const std::vector<std::string>& patterns);

  struct Scratch {
    std::vector<std::shared_ptr<SplitRegex::Scratch>> regexes;  // one a pattern, null for GPT-2's
  };
  Scratch make_scratch() const;

  bool is_gpt2() const { return regexes_.size() == 1 && !regexes_[0]; }

  /// Calls `piece(std::string_view)` for each piece.
  template <typename F>
  void split(std::string_view text, Scratch& scratch, F&& piece) const {
    if (is_gpt2()) {
      while (!text.empty()) {
        const std::size_t length = gpt2_piece(text);
        piece(text.substr(0, length));
        text.remove_prefix(length);
      }
    } else {
      split_from(0, text, scratch, piece);
    }
  }

 private:
  void split_from(std::size_t pattern, std::string_view text, Scratch& scratch,
                  const std::function<void(std::string_view)>& piece) const;
  std::vector<std::shared_ptr<const SplitRegex>> regexes_;  // null stands for GPT-2's pattern
};

}  // namespace phalanx::data
