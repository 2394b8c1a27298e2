// The fingerprint of a tokenizer: a hash of what decides ids and texts. Token files, checkpoints and exports use it to
// name their tokenizer.
//
// Hashed, from the parsed tokenizer.json: the vocabulary (token and id), the merges in order, the added tokens with
// their flags in order of id, unk_token, fuse_unk, byte_fallback and ignore_merges, and every step of normalizer,
// pre_tokenizer, post_processor and decoder.
// Not hashed, because it changes neither ids nor texts: white space, the order of keys and of the vocabulary, how
// merges and characters are written, keys that hold their default, `truncation`, `padding` and components that do
// nothing. So a file saved again by `tokenizers` or transformers is the same tokenizer.
//
//   const std::string id = tokenizer_fingerprint(tokenizer);  // "tok1:" and 32 hexadecimal digits
#pragma once

#include <filesystem>
#include <string>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::data {

/// "tok1" is the version: hashes of different versions cannot be compared.
std::string tokenizer_fingerprint(const BpeTokenizer& tokenizer);

/// The fingerprint of a tokenizer.json; "" if it is of a kind that is not supported.
std::string fingerprint_of_file(const std::filesystem::path& file);

/// Whether both are known, have the same version, and differ.
bool are_other_tokenizers(const std::string& a, const std::string& b);

}  // namespace phalanx::data
