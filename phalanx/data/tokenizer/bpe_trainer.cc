#include "phalanx/data/tokenizer/bpe_trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <queue>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/byte_level.h"
#include "phalanx/data/tokenizer/pre_tokenizer.h"

namespace phalanx::data {

/// How often each distinct piece was seen. The bytes of pieces are in blocks that never move.
struct BpeTrainer::Counts {
  static constexpr std::size_t kBlock = std::size_t{1} << 20;

  void add(std::string_view piece) {
    const auto found = pieces.find(piece);
    if (found != pieces.end()) {
      ++found->second;
      return;
    }
    pieces.emplace(keep(piece), 1);
  }

  std::string_view keep(std::string_view piece) {
    if (blocks.empty() || blocks.back().capacity() - blocks.back().size() < piece.size()) {
      blocks.emplace_back().reserve(std::max(kBlock, piece.size()));
    }
    std::string& block = blocks.back();
    const std::size_t at = block.size();
    block.append(piece);
    return std::string_view(block).substr(at);
  }

  std::deque<std::string> blocks;
  std::unordered_map<std::string_view, std::int64_t> pieces;
};

namespace {

/// The words being merged. The symbols of all words are in one array; the part of a word only gets shorter.
class Corpus {
 public:
  struct Pair {
    TokenId left;
    TokenId right;
    std::int64_t count = 0;
    TokenId result = -1;               // once merged
    std::vector<std::uint32_t> words;  // words in which it may occur; never too few
  };

  void add_word(std::string_view piece, std::int64_t count, const std::array<TokenId, 256>& byte_ids) {
    words_.push_back({symbols_.size(), static_cast<std::uint32_t>(piece.size()), count});
    for (const char byte : piece) symbols_.push_back(byte_ids[static_cast<unsigned char>(byte)]);
  }

  void count_pairs() {
    for (std::uint32_t word = 0; word < words_.size(); ++word) {
      const TokenId* symbols = symbols_.data() + words_[word].begin;
      for (std::uint32_t i = 0; i + 1 < words_[word].length; ++i) {
        change(symbols[i], symbols[i + 1], words_[word].count, word);
      }
    }
    changed_.clear();
  }

  std::size_t pair_count() const { return pairs_.size(); }
  Pair& pair(std::size_t index) { return pairs_[index]; }

  /// Replaces the pair everywhere. Returns the pairs that became more frequent.
  const std::vector<std::uint32_t>& merge(std::uint32_t index, TokenId result) {
    changed_.clear();
    const TokenId left = pairs_[index].left, right = pairs_[index].right;
    pairs_[index].result = result;
    const std::vector<std::uint32_t> words = std::exchange(pairs_[index].words, {});
    for (const std::uint32_t word : words) merge_in(word, left, right, result);
    pairs_[index].count = 0;
    std::sort(changed_.begin(), changed_.end());
    changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
    return changed_;
  }

 private:
  struct Word {
    std::size_t begin;
    std::uint32_t length;
    std::int64_t count;
  };

  void merge_in(std::uint32_t index, TokenId left, TokenId right, TokenId result) {
    Word& word = words_[index];
    TokenId* const symbols = symbols_.data() + word.begin;
    std::uint32_t to = 0;
    for (std::uint32_t from = 0; from < word.length; ++from, ++to) {
      if (symbols[from] != left || from + 1 >= word.length || symbols[from + 1] != right) {
        symbols[to] = symbols[from];
        continue;
      }
      if (to > 0) {
        change(symbols[to - 1], left, -word.count, index);
        change(symbols[to - 1], result, word.count, index);
      }
      if (from + 2 < word.length) {
        change(right, symbols[from + 2], -word.count, index);
        change(result, symbols[from + 2], word.count, index);
      }
      symbols[to] = result;
      ++from;
    }
    word.length = to;
  }

  void change(TokenId left, TokenId right, std::int64_t by, std::uint32_t word) {
    const std::uint64_t key = static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
    const auto [found, added] = index_of_.try_emplace(key, static_cast<std::uint32_t>(pairs_.size()));
    if (added) pairs_.push_back({left, right});
    Pair& pair = pairs_[found->second];
    pair.count += by;
    if (by < 0) return;
    if (pair.words.empty() || pair.words.back() != word) pair.words.push_back(word);
    changed_.push_back(found->second);
  }

  std::vector<TokenId> symbols_;
  std::vector<Word> words_;
  std::vector<Pair> pairs_;
  std::unordered_map<std::uint64_t, std::uint32_t> index_of_;
  std::vector<std::uint32_t> changed_;
};

/// A pair in the queue of merges, with its count at the time it was added.
struct WaitingPair {
  std::int64_t count;
  TokenId left;
  TokenId right;
  std::uint32_t index;
  friend bool operator<(const WaitingPair& a, const WaitingPair& b) {  // the largest is merged next
    if (a.count != b.count) return a.count < b.count;
    return std::pair(a.left, a.right) > std::pair(b.left, b.right);
  }
};

}  // namespace

BpeTrainer::BpeTrainer(BpeTrainerOptions options) : options_(std::move(options)), counts_(std::make_unique<Counts>()) {
  const std::int64_t smallest = 256 + static_cast<std::int64_t>(options_.special_tokens.size());
  if (options_.vocab_size < smallest || options_.vocab_size > (std::int64_t{1} << 24)) {
    throw ConfigError(fmt::format("vocab_size is {}: expected {} (256 bytes and {} special tokens) to {}",
                                  options_.vocab_size, smallest, options_.special_tokens.size(),
                                  std::int64_t{1} << 24));
  }
  for (std::size_t i = 0; i < options_.special_tokens.size(); ++i) {
    const std::string& token = options_.special_tokens[i];
    const auto end = options_.special_tokens.begin() + static_cast<std::ptrdiff_t>(i);
    if (token.size() < 2 || std::find(options_.special_tokens.begin(), end, token) != end) {
      throw ConfigError(fmt::format("special token '{}': expected at least two characters, each token once", token));
    }
  }
}

BpeTrainer::~BpeTrainer() = default;
BpeTrainer::BpeTrainer(BpeTrainer&&) noexcept = default;
BpeTrainer& BpeTrainer::operator=(BpeTrainer&&) noexcept = default;

void BpeTrainer::add(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = gpt2_piece(text);
    counts_->add(text.substr(0, length));
    text.remove_prefix(length);
  }
}

BpeTokenizer BpeTrainer::train(const std::function<void(TrainingProgress)>& progress) const {
  BpeModel model;
  for (const std::string& token : options_.special_tokens) {
    model.added_tokens.push_back({.id = static_cast<TokenId>(model.tokens.size()), .content = token});
    model.tokens.push_back(token);
  }
  std::array<int, 256> bytes{};
  for (int byte = 0; byte < 256; ++byte) bytes[byte] = byte;
  std::sort(bytes.begin(), bytes.end(), [](int a, int b) {
    return code_point_of_byte(static_cast<std::uint8_t>(a)) < code_point_of_byte(static_cast<std::uint8_t>(b));
  });
  std::array<TokenId, 256> byte_ids{};
  for (const int byte : bytes) {
    byte_ids[byte] = static_cast<TokenId>(model.tokens.size());
    model.tokens.emplace_back(1, static_cast<char>(byte));
  }
  std::unordered_map<std::string, TokenId> id_of;
  for (std::size_t id = 0; id < model.tokens.size(); ++id) id_of[model.tokens[id]] = static_cast<TokenId>(id);

  Corpus corpus;
  for (const auto& [piece, count] : counts_->pieces) {
    if (piece.size() > 1) corpus.add_word(piece, count, byte_ids);
  }
  corpus.count_pairs();
  std::priority_queue<WaitingPair> queue;
  const auto wait = [&](std::uint32_t index) {
    const Corpus::Pair& pair = corpus.pair(index);
    if (pair.count > 0) queue.push({pair.count, pair.left, pair.right, index});
  };
  for (std::uint32_t index = 0; index < corpus.pair_count(); ++index) wait(index);

  const auto tell = [&] {
    if (progress) progress({static_cast<std::int64_t>(model.tokens.size()), options_.vocab_size});
  };
  tell();
  while (static_cast<std::int64_t>(model.tokens.size()) < options_.vocab_size && !queue.empty()) {
    const WaitingPair top = queue.top();
    queue.pop();
    const Corpus::Pair& pair = corpus.pair(top.index);
    if (top.count != pair.count) {  // other merges have used up a part: requeued with its present count
      wait(top.index);
      continue;
    }
    if (top.count < options_.min_frequency || top.count < 1) break;
    TokenId result = pair.result;
    if (result < 0) {
      // Two pairs can give the same bytes, in runs of one character: they share the token.
      const std::string token =
          model.tokens[static_cast<std::size_t>(top.left)] + model.tokens[static_cast<std::size_t>(top.right)];
      const auto [found, added] = id_of.try_emplace(token, static_cast<TokenId>(model.tokens.size()));
      if (added) model.tokens.push_back(token);
      result = found->second;
      model.merges.push_back({top.left, top.right, result});
      if (added && model.tokens.size() % 64 == 0) tell();
    }
    for (const std::uint32_t index : corpus.merge(top.index, result)) wait(index);
  }
  tell();
  return BpeTokenizer(std::move(model));
}

}  // namespace phalanx::data
