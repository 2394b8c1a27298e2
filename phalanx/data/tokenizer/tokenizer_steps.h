// The steps around the byte-pair merges of a tokenizer, as plain data: what `normalizer`, `pre_tokenizer` and `decoder`
// of a tokenizer.json say. Normalizer, PreTokenizer and TokenDecoder carry them out.
//
//   SplitStep digits{.pattern = {.text = R"(\p{N}{1,3})", .is_regex = true}, .behavior = SplitBehavior::isolated};
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

namespace phalanx::data {

inline constexpr std::string_view kMetaspace = "\u2581";  // what SentencePiece writes for a space

/// What a step looks for: a regular expression, or the text itself.
struct TextPattern {
  std::string text;
  bool is_regex = false;
  friend bool operator==(const TextPattern&, const TextPattern&) = default;
};

enum class NormalForm : std::uint8_t { nfc, nfd, nfkc, nfkd };

struct NormalFormStep {
  NormalForm form = NormalForm::nfc;
  friend bool operator==(const NormalFormStep&, const NormalFormStep&) = default;
};
struct PrependStep {  // to every stretch of text that is not empty
  std::string text;
  friend bool operator==(const PrependStep&, const PrependStep&) = default;
};
struct ReplaceStep {
  TextPattern pattern;
  std::string content;
  friend bool operator==(const ReplaceStep&, const ReplaceStep&) = default;
};
struct LowercaseStep {
  friend bool operator==(const LowercaseStep&, const LowercaseStep&) = default;
};
struct StripSpacesStep {
  bool left = true;
  bool right = true;
  friend bool operator==(const StripSpacesStep&, const StripSpacesStep&) = default;
};
using NormalizerStep = std::variant<NormalFormStep, PrependStep, ReplaceStep, LowercaseStep, StripSpacesStep>;

/// What becomes of a match: left out, a piece, part of the piece before or behind it, or one piece with its neighbours
/// that match.
enum class SplitBehavior : std::uint8_t { removed, isolated, merged_with_previous, merged_with_next, contiguous };

struct SplitStep {
  TextPattern pattern;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;  // what lies between matches counts as the match
  friend bool operator==(const SplitStep&, const SplitStep&) = default;
};

enum class PrependScheme : std::uint8_t { first, never, always };

struct MetaspaceStep {  // spaces become `replacement`, pieces begin with it
  std::string replacement{kMetaspace};
  PrependScheme scheme = PrependScheme::always;
  bool split = true;
  friend bool operator==(const MetaspaceStep&, const MetaspaceStep&) = default;
};
struct ByteLevelStep {  // bytes are the alphabet from here on: the last step
  bool add_prefix_space = false;
  bool use_regex = true;  // split by GPT-2's pattern
  friend bool operator==(const ByteLevelStep&, const ByteLevelStep&) = default;
};
using PreTokenizerStep = std::variant<SplitStep, MetaspaceStep, ByteLevelStep>;

struct ByteLevelDecode {
  friend bool operator==(const ByteLevelDecode&, const ByteLevelDecode&) = default;
};
struct MetaspaceDecode {
  std::string replacement{kMetaspace};
  bool drops_first = true;  // in the first token it stands for the prefix, not for a space
  friend bool operator==(const MetaspaceDecode&, const MetaspaceDecode&) = default;
};
struct ByteFallbackDecode {  // <0x0A> is a byte
  friend bool operator==(const ByteFallbackDecode&, const ByteFallbackDecode&) = default;
};
struct FuseDecode {  // what follows is about the whole text, no longer about each token
  friend bool operator==(const FuseDecode&, const FuseDecode&) = default;
};
struct StripDecode {
  std::string content;  // one character
  std::int64_t start = 0;
  std::int64_t stop = 0;
  friend bool operator==(const StripDecode&, const StripDecode&) = default;
};
using DecoderStep =
    std::variant<ByteLevelDecode, MetaspaceDecode, ReplaceStep, ByteFallbackDecode, FuseDecode, StripDecode>;

}  // namespace phalanx::data
