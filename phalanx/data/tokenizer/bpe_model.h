// BpeModel: the parts of a BPE tokenizer as plain data, read from and written to tokenizer.json.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/data/tokenizer/tokenizer_steps.h"

namespace phalanx::data {

/// The pair (left, right) becomes `result`. Merges are in order of rank; the first is applied first.
struct BpeMerge {
  TokenId left = 0;
  TokenId right = 0;
  TokenId result = 0;
  friend bool operator==(const BpeMerge&, const BpeMerge&) = default;
};

struct BpeModel {
  std::vector<std::string> tokens;  // by id, bytes or text (see is_byte_level); empty: no token has this id
  std::vector<BpeMerge> merges;
  std::vector<AddedToken> added_tokens;
  bool ignore_merges = false;  // a piece that is a token needs no merging (Llama 3)

  // For a vocabulary of characters: how to encode a character that it lacks. If neither is set, the character is left
  // out.
  bool byte_fallback = false;      // as its bytes, such as <0xC3>, if all of them are tokens
  std::optional<TokenId> unknown;  // else as this token,
  bool fuse_unknown = false;       // once for several unknown characters in a row

  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer = {ByteLevelStep{}};
  std::vector<TokenId> prefix;  // the post-processor's template puts these before a text, for example <s>,
  std::vector<TokenId> suffix;  // and these after it
  std::vector<DecoderStep> decoder = {ByteLevelDecode{}};

  // From the files beside the tokenizer.json; not written to it.
  std::optional<TokenId> begin_of_text, end_of_text, padding;

  /// Merges start from bytes (GPT-2, Llama 3, Qwen); else from characters (Llama 2, Mistral, Gemma).
  bool is_byte_level() const {
    return !pre_tokenizer.empty() && std::holds_alternative<ByteLevelStep>(pre_tokenizer.back());
  }
};

/// Parses the model in a tokenizer.json. Throws DataError that names `name` and the key if it is malformed or not
/// supported.
BpeModel parse_tokenizer_json(std::string_view json, const std::string& name);

std::string write_tokenizer_json(const BpeModel& model);

}  // namespace phalanx::data
