// BpeModel: what a BPE tokenizer consists of, as plain data. Read from and written as tokenizer.json.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/data/tokenizer/tokenizer_steps.h"

namespace phalanx::data {

/// The pair (left, right) becomes `result`; merges are in order of rank, first to be applied first.
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

  // Of a vocabulary of characters: what becomes of one that it lacks. With neither, it is left out.
  bool byte_fallback = false;      // its bytes, as <0xC3>, where all of them are tokens
  std::optional<TokenId> unknown;  // else this,
  bool fuse_unknown = false;       // once for several in a row

  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer = {ByteLevelStep{}};
  std::vector<TokenId> prefix;  // what the post-processor's template puts before a text, a <s> say,
  std::vector<TokenId> suffix;  // and behind it
  std::vector<DecoderStep> decoder = {ByteLevelDecode{}};

  // What the files beside the tokenizer.json say; not written to it.
  std::optional<TokenId> begin_of_text, end_of_text, padding;

  /// Merges start from bytes (GPT-2, Llama 3, Qwen); else from characters (Llama 2, Mistral, Gemma).
  bool is_byte_level() const {
    return !pre_tokenizer.empty() && std::holds_alternative<ByteLevelStep>(pre_tokenizer.back());
  }
};

/// The model in a tokenizer.json. Whatever is malformed or not supported is a DataError that names `name` and the key.
BpeModel parse_tokenizer_json(std::string_view json, const std::string& name);

std::string write_tokenizer_json(const BpeModel& model);

}  // namespace phalanx::data
