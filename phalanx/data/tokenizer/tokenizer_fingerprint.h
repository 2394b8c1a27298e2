// Which tokenizer this is: a hash of what decides ids and texts, by which token files, checkpoints and exports name it.
//
// Hashed are, of the parsed tokenizer.json: the vocabulary (token and id), the merges in order, the added tokens with
// their flags in order of id, unk_token, fuse_unk, byte_fallback and ignore_merges, and every step of normalizer,
// pre_tokenizer, post_processor and decoder. Not hashed is what changes neither ids nor texts: white space, the order
// of keys and of the vocabulary, how merges and characters are written, keys that hold their default, `truncation`,
// `padding` and components that do nothing. So a file saved again by `tokenizers` or transformers is the same
// tokenizer.
//
//   const std::string id = tokenizer_fingerprint(tokenizer);  // "tok1:" and 32 hexadecimal digits
#pragma once

#include <filesystem>
#include <string>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::data {

/// "tok1" is the version: hashes of another one cannot be compared.
std::string tokenizer_fingerprint(const BpeTokenizer& tokenizer);

/// Of a tokenizer.json; "" where it is of a kind that is not read.
std::string fingerprint_of_file(const std::filesystem::path& file);

/// Whether both are known, of the same version, and differ.
bool are_other_tokenizers(const std::string& a, const std::string& b);

}  // namespace phalanx::data
