// The steps around the byte-pair merges of a tokenizer, as plain data: the contents of `normalizer`, `pre_tokenizer`
// and `decoder` of a tokenizer.json. Normalizer, PreTokenizer and TokenDecoder run them.
//
//   SplitStep digits{.pattern = {.text = R"(\p{N}{1,3})", .is_regex = true}, .behavior = SplitBehavior::isolated};
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

namespace phalanx::data {

inline constexpr std::string_view kMetaspace = "\u2581";  // SentencePiece writes this for a space

/// What a step searches: a regular expression, or a literal text.
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
struct PrependStep {  // applies to every non-empty stretch of text
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

/// What becomes of a match: it is left out, is a piece, is part of the piece before or after it, or is one piece with
/// adjacent matches.
enum class SplitBehavior : std::uint8_t { removed, isolated, merged_with_previous, merged_with_next, contiguous };

struct SplitStep {
  TextPattern pattern;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;  // the text between matches counts as the match
  friend bool operator==(const SplitStep&, const SplitStep&) = default;
};

enum class PrependScheme : std::uint8_t { first, never, always };

struct MetaspaceStep {  // spaces become `replacement`, and pieces begin with it
  std::string replacement{kMetaspace};
  PrependScheme scheme = PrependScheme::always;
  bool split = true;
  friend bool operator==(const MetaspaceStep&, const MetaspaceStep&) = default;
};
struct ByteLevelStep {  // maps bytes to the printable alphabet: always the last step
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
  bool drops_first = true;  // in the first token it is the prefix, not a space
  friend bool operator==(const MetaspaceDecode&, const MetaspaceDecode&) = default;
};
struct ByteFallbackDecode {  // <0x0A> is decoded to a byte
  friend bool operator==(const ByteFallbackDecode&, const ByteFallbackDecode&) = default;
};
struct FuseDecode {  // later steps apply to the whole text, not to each token
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
