// BpeModel: what a byte-level BPE tokenizer consists of, as plain data. Read from and written as tokenizer.json.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "phalanx/data/bpe_tokenizer.h"
#include "phalanx/data/split.h"

namespace phalanx::data {

/// The pair (left, right) becomes `result`; merges are in order of rank, first to be applied first.
struct BpeMerge {
  TokenId left = 0;
  TokenId right = 0;
  TokenId result = 0;
  friend bool operator==(const BpeMerge&, const BpeMerge&) = default;
};

struct BpeModel {
  std::vector<std::string> tokens;  // bytes by id; empty: no token of the vocabulary has this id
  std::vector<BpeMerge> merges;
  std::vector<AddedToken> added_tokens;
  std::vector<std::string> split_patterns = {std::string(kGpt2Pattern)};
  bool add_prefix_space = false;  // encode "x" as " x"
  bool ignore_merges = false;     // a piece that is a token needs no merging (Llama 3)
};

/// The model in a tokenizer.json. Whatever is malformed or not supported is a DataError that names `name` and the key.
BpeModel parse_tokenizer_json(std::string_view json, const std::string& name);

std::string write_tokenizer_json(const BpeModel& model);

}  // namespace phalanx::data
