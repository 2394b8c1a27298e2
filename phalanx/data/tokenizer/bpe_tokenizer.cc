#include "phalanx/data/tokenizer/bpe_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <mutex>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/file_kind.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/base/utf8.h"
#include "phalanx/data/tokenizer/added_tokens.h"
#include "phalanx/data/tokenizer/bpe_encoder.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/normalizer.h"
#include "phalanx/data/tokenizer/pre_tokenizer.h"
#include "phalanx/data/tokenizer/special_tokens.h"
#include "phalanx/data/tokenizer/token_decoder.h"

namespace phalanx::data {
namespace {

constexpr std::uint64_t kMaxTokenizerBytes = std::uint64_t{1} << 30;
constexpr const char* kConvert =
    "transformers makes a tokenizer.json by AutoTokenizer.from_pretrained('{}').save_pretrained('NEW_FOLDER')";

}  // namespace

struct BpeTokenizer::State {
  /// The working memory of one call of encode().
  struct EncodeScratch {
    Normalizer::Scratch normalizer;
    PreTokenizer::Scratch split;
    BpeEncoder::Scratch bpe;
  };

  explicit State(BpeModel m)
      : model(std::move(m)),
        normalizer(model.normalizer),
        splitter(model.pre_tokenizer),
        encoder(model),
        decoder(model.decoder) {
    vocab_size = static_cast<std::int64_t>(model.tokens.size());
    for (const AddedToken& token : model.added_tokens) vocab_size = std::max<std::int64_t>(vocab_size, token.id + 1);
    names = model.tokens;
    names.resize(static_cast<std::size_t>(vocab_size));
    special.resize(names.size(), false);
    Normalizer::Scratch scratch = normalizer.make_scratch();
    for (const AddedToken& token : model.added_tokens) {
      const auto index = static_cast<std::size_t>(token.id);
      names[index] = token.normalized ? normalizer.apply(token.content, scratch).text : token.content;
      special[index] = token.special;
      added_with_newline |= token.content.find('\n') != std::string::npos;
    }
    for (std::size_t id = names.size(); id-- > 0;) {
      if (!names[id].empty()) ids[names[id]] = static_cast<TokenId>(id);
    }
    for (const AddedToken& token : model.added_tokens) ids[token.content] = token.id;
    bytes = names;
    if (!model.is_byte_level()) {
      for (std::string& token : bytes) token = decoder.text_of(token, false);
    }
    // Of two tokens with the same text a special one counts, as in the package.
    for (const bool special_first : {true, false}) {
      for (const AddedToken& token : model.added_tokens) {
        if (token.special != special_first) continue;
        (token.normalized ? normalized : exact).add(names[static_cast<std::size_t>(token.id)], token);
      }
    }
  }

  std::unique_ptr<EncodeScratch> borrow() const {
    {
      const std::lock_guard lock(mutex);
      if (!pool.empty()) {
        auto scratch = std::move(pool.back());
        pool.pop_back();
        return scratch;
      }
    }
    auto scratch = std::make_unique<EncodeScratch>();
    scratch->normalizer = normalizer.make_scratch();
    scratch->split = splitter.make_scratch();
    return scratch;
  }
  void give_back(std::unique_ptr<EncodeScratch> scratch) const {
    const std::lock_guard lock(mutex);
    pool.push_back(std::move(scratch));
  }

  void encode(std::string_view text, EncodeOptions options, EncodeScratch& scratch, std::vector<TokenId>& out) const;
  /// Normalizes a text without exact added tokens, then searches it for the others.
  void encode_between(PreTokenizer::Piece piece, EncodeOptions options, EncodeScratch& scratch,
                      std::vector<TokenId>& out) const;
  /// Encodes normalized text without added tokens.
  void encode_ordinary(PreTokenizer::Piece piece, EncodeScratch& scratch, std::vector<TokenId>& out) const;

  BpeModel model;
  Normalizer normalizer;
  PreTokenizer splitter;
  BpeEncoder encoder;
  TokenDecoder decoder;
  AddedTokenFinder exact;       // added tokens found in the text as it is,
  AddedTokenFinder normalized;  // then added tokens found after normalization in the text between those
  std::int64_t vocab_size = 0;
  std::vector<std::string> names;  // by id, added tokens included: as model.tokens has them
  std::vector<std::string> bytes;  // by id: what it adds to a text
  std::vector<bool> special;
  std::unordered_map<std::string_view, TokenId> ids;  // views into `names` and the model's added tokens
  bool added_with_newline = false;
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<EncodeScratch>> pool;
};

void BpeTokenizer::State::encode_ordinary(PreTokenizer::Piece piece, EncodeScratch& scratch,
                                          std::vector<TokenId>& out) const {
  // Written through a pointer into memory allocated beforehand: 3 bytes per token are assumed, and it is doubled if
  // that is too small.
  std::size_t used = out.size();
  out.resize(used + piece.text.size() / 3 + 64);
  TokenId* at = out.data() + used;
  TokenId* limit = out.data() + out.size();
  splitter.split(piece, scratch.split, [&](std::string_view part) {
    const std::size_t room = part.size() + BpeEncoder::kSlack;
    if (static_cast<std::size_t>(limit - at) < room) {
      used = static_cast<std::size_t>(at - out.data());
      out.resize(std::max(out.size() * 2, used + room));
      at = out.data() + used;
      limit = out.data() + out.size();
    }
    at = encoder.encode(part, scratch.bpe, at);
  });
  out.resize(static_cast<std::size_t>(at - out.data()));
}

void BpeTokenizer::State::encode_between(PreTokenizer::Piece piece, EncodeOptions options, EncodeScratch& scratch,
                                         std::vector<TokenId>& out) const {
  const Normalizer::Result result = normalizer.apply(piece.text, scratch.normalizer);
  const bool at_start = piece.at_start && !result.cut_at_start;
  if (!options.added_tokens) return encode_ordinary({result.text, at_start}, scratch, out);
  normalized.split(
      result.text,
      [&](std::string_view part, std::size_t begin) {
        encode_ordinary({part, at_start && begin == 0}, scratch, out);
      },
      [&](TokenId id) { out.push_back(id); });
}

void BpeTokenizer::State::encode(std::string_view text, EncodeOptions options, EncodeScratch& scratch,
                                 std::vector<TokenId>& out) const {
  if (options.add_special_tokens) out.insert(out.end(), model.prefix.begin(), model.prefix.end());
  if (options.added_tokens) {
    exact.split(
        text,
        [&](std::string_view part, std::size_t begin) {
          encode_between({part, begin == 0}, options, scratch, out);
        },
        [&](TokenId id) { out.push_back(id); });
  } else {
    encode_between({text, true}, options, scratch, out);
  }
  if (options.add_special_tokens) out.insert(out.end(), model.suffix.begin(), model.suffix.end());
}

BpeTokenizer::BpeTokenizer(BpeModel model) : state_(std::make_shared<const State>(std::move(model))) {}

namespace {

BpeTokenizer made_of(BpeModel model, const std::string& name) {
  try {
    return BpeTokenizer(std::move(model));
  } catch (const DataError& error) {  // steps that cannot be applied to the vocabulary
    throw DataError(fmt::format("{}: {}", name, error.what()));
  }
}

std::optional<TokenId> token_in(const BpeModel& model, const SpecialToken& token) {
  const auto named = [&](const std::string& name) -> std::optional<TokenId> {
    const auto added = std::ranges::find(model.added_tokens, name, &AddedToken::content);
    if (added != model.added_tokens.end()) return added->id;
    const auto found = std::ranges::find(model.tokens, name);
    if (found == model.tokens.end()) return std::nullopt;
    return static_cast<TokenId>(found - model.tokens.begin());
  };
  if (token.name) return named(*token.name);
  // The model may have more ids than its tokenizer.
  const auto is_added = [&](const AddedToken& added) { return added.id == *token.id; };
  const bool is_known = token.id && (std::ranges::any_of(model.added_tokens, is_added) ||
                                     (*token.id >= 0 && *token.id < std::ssize(model.tokens) &&
                                      !model.tokens[static_cast<std::size_t>(*token.id)].empty()));
  return is_known ? std::optional(static_cast<TokenId>(*token.id)) : std::nullopt;
}

/// Names what there is instead of the tokenizer.json that `path` should be or hold.
std::string hint_about_tokenizer(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (std::string hint = hub_hint(path); !hint.empty()) return hint;
  for (const char* other : {"tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"}) {
    if (!fs::exists(fs::path(path) / other, ignored)) continue;
    return fmt::format(", but {}, which is not read: {}", other, fmt::format(fmt::runtime(kConvert), path));
  }
  return ": expected Hugging Face's tokenizer.json or a directory that holds one";
}

/// Refuses a file of another kind than tokenizer.json, which the JSON parser would call malformed.
void refuse_other_tokenizers(const std::string& text, const std::string& file) {
  const FileKind kind = file_kind(std::string_view(text).substr(0, kFileKindProbe), text.size());
  if (kind == FileKind::lfs_pointer) return;  // the parser reports it
  std::string found;
  if (file.ends_with(".model")) found = "a SentencePiece model";
  if (file.ends_with(".tiktoken")) found = "a vocabulary of tiktoken";
  if (found.empty() && kind != FileKind::text && kind != FileKind::unknown && kind != FileKind::wide_text) {
    found = name_of(kind);
  }
  if (found.empty()) return;
  throw DataError(fmt::format("{} is {}: expected Hugging Face's tokenizer.json{}", file, found,
                              kind == FileKind::gzip
                                  ? "; unpack it by gunzip"
                                  : "; " + fmt::format(fmt::runtime(kConvert), "its model's folder")));
}

}  // namespace

BpeTokenizer BpeTokenizer::load(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const std::string file = fs::is_directory(path, ignored) ? (fs::path(path) / "tokenizer.json").string() : path;
  if (!fs::exists(file, ignored)) {
    throw FileError(fmt::format("there is no tokenizer {}{}", file, hint_about_tokenizer(path)), ENOENT);
  }
  const std::string text = read_file(file, kMaxTokenizerBytes);
  refuse_other_tokenizers(text, file);
  BpeModel model = parse_tokenizer_json(text, file);
  const SpecialTokens tokens = special_tokens_beside(file);
  model.begin_of_text = token_in(model, tokens.bos);
  model.end_of_text = token_in(model, tokens.eos);
  model.padding = token_in(model, tokens.pad);
  if (tokens.eos.name && !model.end_of_text) {
    throw DataError(
        fmt::format("{}: \"eos_token\" is '{}', which is no token of {}", tokens.eos.said_by, *tokens.eos.name, file));
  }
  return made_of(std::move(model), file);
}

BpeTokenizer BpeTokenizer::from_json(std::string_view json, const std::string& name) {
  return made_of(parse_tokenizer_json(json, name), name);
}

std::string BpeTokenizer::to_json() const { return write_tokenizer_json(state_->model); }

void BpeTokenizer::save(const std::string& path) const { replace_file(path, to_json()); }

std::int64_t BpeTokenizer::vocab_size() const { return state_->vocab_size; }

std::optional<TokenId> BpeTokenizer::id_of(std::string_view bytes) const {
  const auto found = state_->ids.find(bytes);
  return found == state_->ids.end() ? std::nullopt : std::optional(found->second);
}

bool BpeTokenizer::is_known(std::int64_t id) const {
  return id >= 0 && id < state_->vocab_size && !state_->bytes[static_cast<std::size_t>(id)].empty();
}

std::string_view BpeTokenizer::bytes_of(TokenId id) const {
  if (!is_known(id)) {
    throw DataError(fmt::format("token {} is not in the vocabulary of {} tokens", id, state_->vocab_size));
  }
  return state_->bytes[static_cast<std::size_t>(id)];
}

bool BpeTokenizer::is_special(TokenId id) const {
  return id >= 0 && id < state_->vocab_size && state_->special[static_cast<std::size_t>(id)];
}

std::optional<TokenId> BpeTokenizer::end_of_text() const {
  if (model().end_of_text) return model().end_of_text;
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"}) {
    if (const auto id = id_of(name); id && is_special(*id)) return id;
  }
  return std::nullopt;
}

const BpeModel& BpeTokenizer::model() const { return state_->model; }

std::vector<TokenId> BpeTokenizer::encode(std::string_view text, EncodeOptions options) const {
  std::vector<TokenId> ids;
  encode_to(text, ids, options);
  return ids;
}

void BpeTokenizer::encode_to(std::string_view text, std::vector<TokenId>& ids, EncodeOptions options) const {
  auto scratch = state_->borrow();
  state_->encode(text, options, *scratch, ids);
  state_->give_back(std::move(scratch));
}

void BpeTokenizer::decode_next(TokenId id, DecodeOptions options, DecodeState& state, std::string& text) const {
  if (!is_known(id)) return;
  std::string_view added = bytes_of(id);
  if (options.skip_special_tokens && is_special(id)) return;
  const TokenDecoder& decoder = state_->decoder;
  std::string as_first;
  if (state.first && decoder.first_differs()) {
    as_first = decoder.text_of(state_->names[static_cast<std::size_t>(id)], true);
    added = as_first;
  }
  state.first = false;
  if (state.at_start && decoder.strip_count() > 0) {
    while (state.stripped < decoder.strip_count() && added.starts_with(decoder.strip_content())) {
      added.remove_prefix(decoder.strip_content().size());
      ++state.stripped;
    }
    state.at_start = added.empty() && state.stripped < decoder.strip_count();
  }
  text += added;
}

std::string BpeTokenizer::decode(std::span<const TokenId> ids, DecodeOptions options) const {
  std::string text;
  DecodeState state;
  for (const TokenId id : ids) decode_next(id, options, state, text);
  return text;
}

std::string BpeTokenizer::decode(std::span<const std::int64_t> ids, DecodeOptions options) const {
  std::string text;
  DecodeState state;
  for (const std::int64_t id : ids) {
    if (is_known(id)) decode_next(static_cast<TokenId>(id), options, state, text);
  }
  return text;
}

std::size_t BpeTokenizer::safe_cut(std::string_view text, std::size_t limit) const {
  if (limit >= text.size()) return text.size();
  if (!state_->splitter.is_gpt2() || !state_->normalizer.empty() || state_->added_with_newline) return 0;
  // Inside a piece GPT-2's pattern has a newline only after white space, and it never looks past such a position.
  for (std::size_t at = limit; at > 0; --at) {
    const auto before = static_cast<unsigned char>(text[at - 1]);
    if (text[at] == '\n' && before > 0x20 && before < 0x7F) return at;
  }
  return 0;
}

StreamingDecoder::StreamingDecoder(BpeTokenizer tokenizer, DecodeOptions options)
    : tokenizer_(std::move(tokenizer)), options_(options) {}

std::string StreamingDecoder::add(TokenId id) {
  std::string text = pending_;
  tokenizer_.decode_next(id, options_, state_, text);
  const std::size_t tail = unfinished_tail(text);
  pending_ = text.substr(text.size() - tail);
  text.resize(text.size() - tail);
  return text;
}

std::string StreamingDecoder::finish() { return std::exchange(pending_, {}); }

}  // namespace phalanx::data
