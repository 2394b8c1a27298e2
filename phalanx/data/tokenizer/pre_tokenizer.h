// PreTokenizer splits a text into the pieces that byte-pair merges never cross.
//
// The steps of a tokenizer.json's pre-tokenizer are applied one after another, each to every piece so far. GPT-2's
// pattern has an equivalent hand-written matcher, about ten times faster than the regular expression. All others run
// through PCRE2 (text_pattern.h).
//
//   PreTokenizer splitter({ByteLevelStep{}});
//   PreTokenizer::Scratch scratch = splitter.make_scratch();
//   splitter.split({"Hello there"}, scratch, [&](std::string_view piece) { encode(piece); });  // in order
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "phalanx/data/tokenizer/text_pattern.h"
#include "phalanx/data/tokenizer/tokenizer_steps.h"

namespace phalanx::data {

inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// The number of bytes that kGpt2Pattern matches at the start of `text`.
/// REQUIRES: `text` is not empty.
std::size_t gpt2_piece(std::string_view text);

class PreTokenizer {
 public:
  /// Throws DataError if a pattern is empty or not valid.
  explicit PreTokenizer(const std::vector<PreTokenizerStep>& steps);

  struct Piece {
    std::string_view text;
    bool at_start = true;  // the piece begins at the start of the user's text
  };

  struct Range {
    std::size_t begin = 0;
    std::size_t end = 0;
    bool matches = false;
  };
  struct StepScratch {
    PatternFinder::Scratch finder;
    std::string text;  // the step's output for a piece; later steps see views of it
    std::vector<Range> ranges;
  };
  struct Scratch {
    std::vector<StepScratch> steps;
  };
  Scratch make_scratch() const;

  /// Whether the pieces are exactly those of kGpt2Pattern.
  bool is_gpt2() const { return is_gpt2_; }

  /// Calls `sink(std::string_view)` for each non-empty piece. The view is valid only within the call.
  template <typename F>
  void split(Piece piece, Scratch& scratch, F&& sink) const {
    if (is_gpt2_) {
      for_each_gpt2_piece(piece.text,
                          [&](std::size_t begin, std::size_t end) { sink(piece.text.substr(begin, end - begin)); });
    } else {
      split_from(0, piece, scratch, sink);
    }
  }

 private:
  using RangeSink = std::function<void(std::size_t begin, std::size_t end)>;
  using PieceSink = std::function<void(std::string_view)>;

  struct Split {
    explicit Split(const SplitStep& step);
    void apply(std::string_view text, StepScratch& scratch, const RangeSink& piece) const;
    PatternFinder finder;
    SplitBehavior behavior;
    bool invert;
    bool is_gpt2;
  };
  using Step = std::variant<Split, MetaspaceStep, ByteLevelStep>;

  template <typename F>
  static void for_each_gpt2_piece(std::string_view text, F&& piece) {
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t length = gpt2_piece(text.substr(at));
      piece(at, at + length);
      at += length;
    }
  }

  static std::string_view with_metaspaces(const MetaspaceStep& step, Piece piece, std::string& out);
  void split_from(std::size_t step, Piece piece, Scratch& scratch, const PieceSink& sink) const;

  std::vector<Step> steps_;
  bool is_gpt2_ = false;
};

}  // namespace phalanx::data
