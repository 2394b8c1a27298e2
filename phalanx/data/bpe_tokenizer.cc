#include "phalanx/data/bpe_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/data/added_tokens.h"
#include "phalanx/data/bpe_encoder.h"
#include "phalanx/data/bpe_model.h"
#include "phalanx/data/split.h"
#include "phalanx/data/unicode.h"

namespace phalanx::data {
namespace {

constexpr std::uint64_t kMaxTokenizerBytes = std::uint64_t{1} << 30;

}  // namespace

struct BpeTokenizer::State {
  /// What one call of encode() works with.
  struct EncodeScratch {
    explicit EncodeScratch(Splitter::Scratch split_scratch) : split(std::move(split_scratch)) {}
    Splitter::Scratch split;
    BpeEncoder::Scratch bpe;
    std::string prefixed;
  };

  explicit State(BpeModel m)
      : model(std::move(m)),
        splitter(model.split_patterns),
        encoder(model),
        exact(model.added_tokens, false),
        normalized(model.added_tokens, true) {
    vocab_size = static_cast<std::int64_t>(model.tokens.size());
    for (const AddedToken& token : model.added_tokens) vocab_size = std::max<std::int64_t>(vocab_size, token.id + 1);
    bytes.resize(static_cast<std::size_t>(vocab_size));
    special.resize(static_cast<std::size_t>(vocab_size), false);
    for (std::size_t id = 0; id < model.tokens.size(); ++id) bytes[id] = model.tokens[id];
    for (const AddedToken& token : model.added_tokens) {
      bytes[static_cast<std::size_t>(token.id)] = token.content;
      special[static_cast<std::size_t>(token.id)] = token.special;
    }
    for (std::size_t id = bytes.size(); id-- > 0;) {
      if (!bytes[id].empty()) ids[bytes[id]] = static_cast<TokenId>(id);
    }
    for (const AddedToken& token : model.added_tokens) {
      ids[token.content] = token.id;
      added_with_newline |= token.content.find('\n') != std::string::npos;
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
    return std::make_unique<EncodeScratch>(splitter.make_scratch());
  }
  void give_back(std::unique_ptr<EncodeScratch> scratch) const {
    const std::lock_guard lock(mutex);
    pool.push_back(std::move(scratch));
  }

  /// Text without added tokens.
  void encode_ordinary(std::string_view text, EncodeScratch& scratch, std::vector<TokenId>& out) const;
  void encode_without(const AddedTokenFinder& finder, std::string_view text, EncodeScratch& scratch,
                      std::vector<TokenId>& out) const;

  BpeModel model;
  Splitter splitter;
  BpeEncoder encoder;
  AddedTokenFinder exact;       // added tokens found in the text as it is,
  AddedTokenFinder normalized;  // then, in what lies between, those found after normalization
  std::int64_t vocab_size = 0;
  std::vector<std::string> bytes;  // by id, added tokens included
  std::vector<bool> special;
  std::unordered_map<std::string_view, TokenId> ids;
  bool added_with_newline = false;
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<EncodeScratch>> pool;
};

void BpeTokenizer::State::encode_ordinary(std::string_view text, EncodeScratch& scratch,
                                          std::vector<TokenId>& out) const {
  if (text.empty()) return;
  if (model.add_prefix_space && text[0] != ' ') {
    scratch.prefixed.assign(1, ' ').append(text);
    text = scratch.prefixed;
  }
  // Written through a pointer into room made beforehand; grown by a guess of 3 bytes a token, doubled where it is
  // short.
  std::size_t used = out.size();
  out.resize(used + text.size() / 3 + 64);
  TokenId* at = out.data() + used;
  TokenId* limit = out.data() + out.size();
  splitter.split(text, scratch.split, [&](std::string_view piece) {
    const std::size_t room = piece.size() + BpeEncoder::kSlack;
    if (static_cast<std::size_t>(limit - at) < room) {
      used = static_cast<std::size_t>(at - out.data());
      out.resize(std::max(out.size() * 2, used + room));
      at = out.data() + used;
      limit = out.data() + out.size();
    }
    at = encoder.encode(piece, scratch.bpe, at);
  });
  out.resize(static_cast<std::size_t>(at - out.data()));
}

void BpeTokenizer::State::encode_without(const AddedTokenFinder& finder, std::string_view text, EncodeScratch& scratch,
                                         std::vector<TokenId>& out) const {
  const auto between = [&](std::string_view part) {
    if (&finder == &exact && !normalized.empty()) {
      encode_without(normalized, part, scratch, out);
    } else {
      encode_ordinary(part, scratch, out);
    }
  };
  std::size_t done = 0;
  for (auto match = finder.next(text, 0); match.length > 0; match = finder.next(text, done)) {
    between(text.substr(done, match.begin - done));
    out.push_back(match.id);
    done = match.begin + match.length;
  }
  between(text.substr(done));
}

BpeTokenizer::BpeTokenizer(BpeModel model) : state_(std::make_shared<const State>(std::move(model))) {}

BpeTokenizer BpeTokenizer::load(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const std::string file = fs::is_directory(path, ignored) ? (fs::path(path) / "tokenizer.json").string() : path;
  return from_json(read_file(file, kMaxTokenizerBytes), file);
}

BpeTokenizer BpeTokenizer::from_json(std::string_view json, const std::string& name) {
  return BpeTokenizer(parse_tokenizer_json(json, name));
}

std::string BpeTokenizer::to_json() const { return write_tokenizer_json(state_->model); }

void BpeTokenizer::save(const std::string& path) const { replace_file(path, to_json()); }

std::int64_t BpeTokenizer::vocab_size() const { return state_->vocab_size; }

std::optional<TokenId> BpeTokenizer::id_of(std::string_view bytes) const {
  const auto found = state_->ids.find(bytes);
  return found == state_->ids.end() ? std::nullopt : std::optional(found->second);
}

std::string_view BpeTokenizer::bytes_of(TokenId id) const {
  if (id < 0 || id >= state_->vocab_size || state_->bytes[static_cast<std::size_t>(id)].empty()) {
    throw DataError(fmt::format("token {} is not in the vocabulary of {} tokens", id, state_->vocab_size));
  }
  return state_->bytes[static_cast<std::size_t>(id)];
}

bool BpeTokenizer::is_special(TokenId id) const {
  return id >= 0 && id < state_->vocab_size && state_->special[static_cast<std::size_t>(id)];
}

std::optional<TokenId> BpeTokenizer::end_of_text() const {
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
  if (options.added_tokens) {
    state_->encode_without(state_->exact, text, *scratch, ids);
  } else {
    state_->encode_ordinary(text, *scratch, ids);
  }
  state_->give_back(std::move(scratch));
}

std::string BpeTokenizer::decode(std::span<const TokenId> ids, DecodeOptions options) const {
  std::string text;
  for (const TokenId id : ids) {
    const std::string_view bytes = bytes_of(id);
    if (!options.skip_special_tokens || !is_special(id)) text += bytes;
  }
  return text;
}

std::string BpeTokenizer::decode(std::span<const std::int64_t> ids, DecodeOptions options) const {
  std::string text;
  for (const std::int64_t id : ids) {
    // Out of TokenId's range is out of the vocabulary; -1 keeps it so.
    const TokenId narrow = id >= 0 && id < vocab_size() ? static_cast<TokenId>(id) : -1;
    if (narrow < 0) throw DataError(fmt::format("token {} is not in the vocabulary of {} tokens", id, vocab_size()));
    const std::string_view bytes = bytes_of(narrow);
    if (!options.skip_special_tokens || !is_special(narrow)) text += bytes;
  }
  return text;
}

std::size_t BpeTokenizer::safe_cut(std::string_view text, std::size_t limit) const {
  if (limit >= text.size()) return text.size();
  if (!state_->splitter.is_gpt2() || state_->model.add_prefix_space || state_->added_with_newline) return 0;
  // GPT-2's pattern never has a newline inside a piece after anything but white space, nor looks past such a place.
  for (std::size_t at = limit; at > 0; --at) {
    const auto before = static_cast<unsigned char>(text[at - 1]);
    if (text[at] == '\n' && before > 0x20 && before < 0x7F) return at;
  }
  return 0;
}

StreamingDecoder::StreamingDecoder(BpeTokenizer tokenizer, DecodeOptions options)
    : tokenizer_(std::move(tokenizer)), options_(options) {}

std::string StreamingDecoder::add(TokenId id) {
  const std::string_view bytes = tokenizer_.bytes_of(id);
  if (options_.skip_special_tokens && tokenizer_.is_special(id)) return {};
  std::string text = std::exchange(pending_, {});
  text += bytes;
  const std::size_t tail = unfinished_tail(text);
  pending_ = text.substr(text.size() - tail);
  text.resize(text.size() - tail);
  return text;
}

std::string StreamingDecoder::finish() { return std::exchange(pending_, {}); }

}  // namespace phalanx::data
