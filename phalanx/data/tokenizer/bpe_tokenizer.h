// BpeTokenizer: byte-pair encoding, loaded from and saved as Hugging Face `tokenizer.json`.
//
// There are two kinds.
// - Byte-level (GPT-2, Llama 3, Qwen): decode(encode(x)) == x exactly for any bytes, if there is no normalizer and the
//   vocabulary has a token for each byte. A byte that it lacks becomes the unknown token, or nothing.
// - Of characters (Llama 2, Mistral, Gemma): a character that the vocabulary lacks becomes its bytes or the unknown
//   token. Bytes that are not UTF-8 count as such characters.
// Ids are those of the `tokenizers` Python package for the same file. docs/tokenizers.md lists the supported
// components. An unsupported component is a DataError that names it, the key and what is supported.
//
// A tokenizer is immutable after loading. Its const methods may be called from any number of threads: each call takes a
// scratch from a pool, with a cache of pieces already encoded. Copies share everything.
//
//   BpeTokenizer tokenizer = BpeTokenizer::load("tokenizer.json");
//   std::vector<TokenId> ids = tokenizer.encode("Hello there");
//   std::string text = tokenizer.decode(ids);
//   ids = tokenizer.encode("Hello there", {.add_special_tokens = true});  // begins with <s>, if its template says so
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
  bool special = true;       // left out by decode() on request
  bool normalized = false;   // searched in the text after the normalizer, after the tokens that are not normalized
  bool single_word = false;  // matches only if no letter, digit or similar character is beside it
  bool lstrip = false;       // takes the white space before it too
  bool rstrip = false;       // takes the white space after it too
};

struct BpeModel;  // vocabulary, merges, added tokens, the steps around them (bpe_model.h)

struct EncodeOptions {
  bool added_tokens = true;         // match added tokens in the text; false treats their text as ordinary text
  bool add_special_tokens = false;  // add those of the post-processor's template, for example the <s> of a Llama
};

struct DecodeOptions {
  bool skip_special_tokens = false;
};

class BpeTokenizer {
 public:
  explicit BpeTokenizer(BpeModel model);

  /// `path` is a tokenizer.json or a directory that holds one. The files beside it, which name the tokens that begin
  /// and end a text (special_tokens.h), are read too. Throws DataError if they name a token that does not exist.
  static BpeTokenizer load(const std::string& path);
  /// `name` replaces the file's name in messages.
  static BpeTokenizer from_json(std::string_view json, const std::string& name = "tokenizer.json");
  std::string to_json() const;
  /// Replaces the file completely or not at all.
  void save(const std::string& path) const;

  /// The smallest number above every id, including added tokens: the rows a model's embedding must have.
  std::int64_t vocab_size() const;
  /// The id of an added token, by its content, or of a token, by its bytes (byte-level) or its text in the vocabulary.
  std::optional<TokenId> id_of(std::string_view added_or_token) const;
  /// The bytes that a token decodes to inside a text. Throws DataError for an id outside the vocabulary.
  std::string_view bytes_of(TokenId id) const;
  bool is_special(TokenId id) const;
  /// Whether a token has this id.
  bool is_known(std::int64_t id) const;
  /// The token that ends a document: the eos_token of the files beside the tokenizer.json. If they do not name one:
  /// <|endoftext|>, <|end_of_text|>, </s> or <eos>, whichever exists first.
  std::optional<TokenId> end_of_text() const;
  const BpeModel& model() const;

  std::vector<TokenId> encode(std::string_view text, EncodeOptions options = {}) const;
  /// Appends to `ids`.
  void encode_to(std::string_view text, std::vector<TokenId>& ids, EncodeOptions options = {}) const;

  /// Ids without a token add nothing. A model may have more ids than its tokenizer, to round their number up.
  std::string decode(std::span<const TokenId> ids, DecodeOptions options = {}) const;
  std::string decode(std::span<const std::int64_t> ids, DecodeOptions options = {}) const;

  /// The state that decoding the tokens so far leaves for the next token.
  struct DecodeState {
    bool first = true;
    std::int64_t stripped = 0;  // how much of what the decoder strips from the start of a text
    bool at_start = true;       // only stripped content has been seen
  };
  /// Appends the text of `id`, which may end inside a character: see StreamingDecoder.
  void decode_next(TokenId id, DecodeOptions options, DecodeState& state, std::string& text) const;

  /// The largest position, at most `limit`, at which a text can be cut so that encoding the two parts one after the
  /// other gives the ids of the whole; 0 if none is known. With it a file larger than memory can be encoded in parts.
  std::size_t safe_cut(std::string_view text, std::size_t limit) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// Decodes a stream of ids. It outputs text only in whole UTF-8 characters, which a terminal can print at once.
///
///   StreamingDecoder decoder(tokenizer);
///   for (TokenId id : generated) std::cout << decoder.add(id) << std::flush;
///   std::cout << decoder.finish();
class StreamingDecoder {
 public:
  explicit StreamingDecoder(BpeTokenizer tokenizer, DecodeOptions options = {});
  /// Returns the characters that this id completes. Bytes that can no longer become a character are returned as they
  /// are.
  std::string add(TokenId id);
  /// Returns what is left, complete or not.
  std::string finish();

 private:
  BpeTokenizer tokenizer_;
  DecodeOptions options_;
  BpeTokenizer::DecodeState state_;
  std::string pending_;  // at most 3 bytes: the start of a character
};

}  // namespace phalanx::data
