// BpeTokenizer: byte-pair encoding, loaded from and saved as Hugging Face `tokenizer.json`.
//
// Two kinds: byte-level (GPT-2, Llama 3, Qwen), where decode(encode(x)) == x exactly for any bytes if there is no
// normalizer and the vocabulary has a token for each byte (one that it lacks becomes the unknown token, or nothing),
// and of characters (Llama 2, Mistral, Gemma), where a character that the vocabulary lacks becomes its bytes or the
// unknown token. Bytes that are no UTF-8 count as such characters. Ids are those of the `tokenizers` Python package for
// the same file. The components read are named in docs/data.md; one that is not supported is a DataError that names it,
// the key and what is supported.
//
// A tokenizer is immutable after loading; its const methods may be called from any number of threads (each call takes
// a scratch of its own from a pool, with a cache of pieces already encoded). Copies share everything.
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
  bool special = true;       // left out by decode() where asked
  bool normalized = false;   // looked for in the text as the normalizer leaves it, after those that are not
  bool single_word = false;  // counts only where no letter, digit or the like stands beside it
  bool lstrip = false;       // takes the white space before it along,
  bool rstrip = false;       // that behind it
};

struct BpeModel;  // vocabulary, merges, added tokens, the steps around them (bpe_model.h)

struct EncodeOptions {
  bool added_tokens = true;         // match added tokens in the text; false treats their text as ordinary text
  bool add_special_tokens = false;  // those of the post-processor's template: the <s> that a Llama wants first, say
};

struct DecodeOptions {
  bool skip_special_tokens = false;
};

class BpeTokenizer {
 public:
  explicit BpeTokenizer(BpeModel model);

  /// `path` is a tokenizer.json or a directory that holds one. What the files beside it say of the tokens that begin
  /// and end a text (special_tokens.h) is read, too; DataError where they name one that there is not.
  static BpeTokenizer load(const std::string& path);
  /// `name` stands for the file in messages.
  static BpeTokenizer from_json(std::string_view json, const std::string& name = "tokenizer.json");
  std::string to_json() const;
  /// Replaces the file whole or not at all.
  void save(const std::string& path) const;

  /// Smallest number above every id, added tokens included: the rows a model's embedding must have.
  std::int64_t vocab_size() const;
  /// Of an added token's content, or of a token: its bytes (byte-level) or as it stands in the vocabulary.
  std::optional<TokenId> id_of(std::string_view added_or_token) const;
  /// The bytes a token stands for inside a text. An id outside the vocabulary is a DataError.
  std::string_view bytes_of(TokenId id) const;
  bool is_special(TokenId id) const;
  /// Whether a token has this id.
  bool is_known(std::int64_t id) const;
  /// The token that ends a document: the eos_token of the files beside the tokenizer.json. Where they say nothing,
  /// <|endoftext|>, <|end_of_text|>, </s> or <eos>, whichever exists first.
  std::optional<TokenId> end_of_text() const;
  const BpeModel& model() const;

  std::vector<TokenId> encode(std::string_view text, EncodeOptions options = {}) const;
  /// Appends to `ids`.
  void encode_to(std::string_view text, std::vector<TokenId>& ids, EncodeOptions options = {}) const;

  /// Ids that no token has add nothing: a model may have more of them than its tokenizer, to round their number up.
  std::string decode(std::span<const TokenId> ids, DecodeOptions options = {}) const;
  std::string decode(std::span<const std::int64_t> ids, DecodeOptions options = {}) const;

  /// What the tokens so far have left for the next one to know.
  struct DecodeState {
    bool first = true;
    std::int64_t stripped = 0;  // of what the decoder strips from the start of a text
    bool at_start = true;       // nothing but what is stripped has been seen
  };
  /// Appends what `id` adds to a text, perhaps only a part of a character: see StreamingDecoder.
  void decode_next(TokenId id, DecodeOptions options, DecodeState& state, std::string& text) const;

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
  BpeTokenizer::DecodeState state_;
  std::string pending_;  // at most 3 bytes: the start of a character
};

}  // namespace phalanx::data
