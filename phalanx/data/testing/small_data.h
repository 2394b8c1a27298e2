// For tests: small token files and tokenizers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/data/token_file.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"

namespace phalanx::data {

/// A file of raw uint16: first, first + 1, ...
inline TokenFile counting_file(const std::filesystem::path& path, int count, int first = 0) {
  std::vector<std::uint16_t> ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), static_cast<std::uint16_t>(first));
  write_file(path, std::string(reinterpret_cast<const char*>(ids.data()), ids.size() * 2));
  return TokenFile(path.string(), {.type = TokenType::u16});
}

/// PREFIX.bin with its index, of one document. `fingerprint`: the tokenizer's; empty: unknown.
inline TokenFile small_token_file(const std::filesystem::path& prefix, const std::string& fingerprint = "") {
  TokenFileWriter writer(prefix.string(), {.vocab_size = 260, .tokenizer = fingerprint});
  writer.add_document(std::vector<std::int32_t>{1, 2, 3});
  writer.finish();
  return TokenFile(prefix.string());
}

/// A tokenizer of 260 ids: the bytes and the most frequent merges of the text.
inline BpeTokenizer small_tokenizer(const std::string& text) {
  BpeTrainer trainer({.vocab_size = 260});
  trainer.add(text);
  return trainer.train();
}

/// The tokenizer with a template that puts these ids before and after a text.
inline BpeTokenizer with_template(const BpeTokenizer& tokenizer, std::vector<TokenId> prefix,
                                  std::vector<TokenId> suffix) {
  BpeModel model = tokenizer.model();
  model.prefix = std::move(prefix);
  model.suffix = std::move(suffix);
  return BpeTokenizer(std::move(model));
}

}  // namespace phalanx::data
