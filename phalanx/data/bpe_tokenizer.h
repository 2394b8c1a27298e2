// BpeTokenizer: byte-level byte-pair encoding, loaded from and saved as Hugging Face `tokenizer.json`.
//
// Any bytes can be encoded and decode(encode(x)) == x exactly, invalid UTF-8 included: the 256 bytes are the alphabet.
// Ids are those of the `tokenizers` Python package for the same file. The components read are named in docs/data.md;
// one that is not supported is a DataError that names it, the key and what is supported.
//
// A tokenizer is immutable after loading; its const methods may be called from any number of threads (each call takes
// a scratch of its own from a pool, with a cache of pieces already encoded). Copies share everything.
//
//   BpeTokenizer tokenizer = BpeTokenizer::load("tokenizer.json");
//   std::vector<TokenId> ids = tokenizer.encode("Hello there");
//   std::string text = tokenizer.decode(ids);
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx::data {

using TokenId = std::int32_t;

/// A token that is matched whole in the text before anything else, such as <|endoftext|>.
struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool special = true;      // left out by decode() where asked
  bool normalized = false;  // kept for the file; without a normalizer it only orders the matching
};

struct BpeModel;  // vocabulary, merges, added tokens, split patterns (bpe_model.h)

struct EncodeOptions {
  bool added_tokens = true;  // match added tokens in the text; false treats their text as ordinary text
};

struct DecodeOptions {
  bool skip_special_tokens = false;
};

class BpeTokenizer {
 public:
  explicit BpeTokenizer(BpeModel model);

  /// `path` is a tokenizer.json or a directory that holds one.
  static BpeTokenizer load(const std::string& path);
  /// `name` stands for the file in messages.
  static BpeTokenizer from_json(std::string_view json, const std::string& name = "tokenizer.json");
  std::string to_json() const;
  /// Replaces the file whole or not at all.
  void save(const std::string& path) const;

  /// Smallest number above every id, added tokens included: the rows a model's embedding must have.
  std::int64_t vocab_size() const;
  std::optional<TokenId> id_of(std::string_view added_or_token_bytes) const;
  /// The bytes a token stands for (an added token's content). An id outside the vocabulary is a DataError.
  std::string_view bytes_of(TokenId id) const;
  bool is_special(TokenId id) const;
  /// The token that ends a document: <|endoftext|>, <|end_of_text|>, </s> or <eos>, whichever exists first.
  std::optional<TokenId> end_of_text() const;
  const BpeModel& model() const;

  std::vector<TokenId> encode(std::string_view text, EncodeOptions options = {}) const;
  /// Appends to `ids`.
  void encode_to(std::string_view text, std::vector<TokenId>& ids, EncodeOptions options = {}) const;

  std::string decode(std::span<const TokenId> ids, DecodeOptions options = {}) const;
  std::string decode(std::span<const std::int64_t> ids, DecodeOptions options = {}) const;

  /// The largest place at most `limit` where a text can be cut so that encoding the two parts one after the other
  /// gives the ids of the whole; 0 where none is known. Lets a file larger than memory be encoded in parts.
  std::size_t safe_cut(std::string_view text, std::size_t limit) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// Decodes a stream of ids, giving out text only in whole UTF-8 characters: what a terminal can print at once.
///
///   StreamingDecoder decoder(tokenizer);
///   for (TokenId id : generated) std::cout << decoder.add(id) << std::flush;
///   std::cout << decoder.finish();
class StreamingDecoder {
 public:
  explicit StreamingDecoder(BpeTokenizer tokenizer, DecodeOptions options = {});
  /// The characters that this id completes; bytes that can no longer become a character are given out as they are.
  std::string add(TokenId id);
  /// What is left, complete or not.
  std::string finish();

 private:
  BpeTokenizer tokenizer_;
  DecodeOptions options_;
  std::string pending_;  // at most 3 bytes: the start of a character
};

}  // namespace phalanx::data
