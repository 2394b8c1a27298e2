// BpeEncoder encodes one piece of text to token ids, by the rank of its merges. It is the inner loop of BpeTokenizer.
//
// Most pieces of real text have been seen before. A direct-mapped cache holds their ids; it is part of Scratch, so it
// needs no locks. A hit is one hash, one cache line and one copy. Other pieces are merged, lowest rank first and
// leftmost among equals: short pieces by scanning an array, long pieces by a heap, so that a megabyte without a space
// costs n log n. Nothing is allocated once the scratch has grown to the longest piece.
//
// Tokenizers in the style of SentencePiece often do not split at all: a whole text is one piece. If no merge joins a
// character to a space (U+2581) after it, as in vocabularies trained on words, merging word by word gives the same ids,
// and the cache can hold words.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "phalanx/data/tokenizer/bpe_model.h"

namespace phalanx::data {

/// The merges as a hash table from a pair of ids to its rank and result.
class MergeTable {
 public:
  struct Entry {
    std::uint64_t pair = kEmpty;
    std::uint32_t rank = 0;
    TokenId result = 0;
  };

  explicit MergeTable(const std::vector<BpeMerge>& merges);

  const Entry* find(TokenId left, TokenId right) const {
    const std::uint64_t pair = key(left, right);
    for (std::size_t at = place(pair);; at = (at + 1) & mask_) {
      if (entries_[at].pair == pair) return &entries_[at];
      if (entries_[at].pair == kEmpty) return nullptr;
    }
  }

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  static std::uint64_t key(TokenId left, TokenId right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
  }
  std::size_t place(std::uint64_t pair) const {
    return static_cast<std::size_t>(pair * 0x9E3779B97F4A7C15ull >> shift_);
  }

  std::vector<Entry> entries_;
  std::size_t mask_ = 0;
  int shift_ = 0;
};

/// The token for each byte in a byte-level vocabulary; -1 if there is none.
std::array<TokenId, 256> tokens_of_bytes(const BpeModel& model);

class BpeEncoder {
 public:
  explicit BpeEncoder(const BpeModel& model);

  struct Scratch;

  /// Appends the ids of `piece` at `out` and returns the new end.
  /// REQUIRES: `out` has room for piece.size() + kSlack ids.
  TokenId* encode(std::string_view piece, Scratch& scratch, TokenId* out) const;

  static constexpr std::size_t kSlack = 16;  // a cache hit copies a whole line's worth of ids

 private:
  TokenId* encode_cached(std::string_view piece, Scratch& scratch, TokenId* out) const;
  TokenId* merge(std::string_view piece, Scratch& scratch, TokenId* out) const;
  /// The ids that merging starts from, one for each byte or character; at most piece.size(). Returns their number.
  std::size_t alphabet_ids(std::string_view piece, TokenId* out) const;
  std::size_t character_ids(std::string_view piece, TokenId* out) const;
  /// For a byte-level vocabulary that lacks some bytes.
  std::size_t known_byte_ids(std::string_view piece, TokenId* out) const;
  TokenId* merge_short(std::string_view piece, TokenId* out) const;
  TokenId* merge_long(std::string_view piece, Scratch& scratch, TokenId* out) const;
  TokenId id_of_character(std::uint32_t code_point) const;

  static constexpr TokenId kNoToken = -1;
  static constexpr std::uint32_t kTableSize = 0x10000;

  MergeTable merges_;
  bool byte_level_;
  bool lacks_bytes_ = false;
  bool cuts_words_ = false;              // merges word by word, see above
  std::array<TokenId, 256> byte_ids_{};  // byte-level: the id of each byte; else of <0x00> and so on
  std::vector<TokenId> character_ids_;   // by code point below kTableSize, or kNoToken
  std::unordered_map<std::uint32_t, TokenId> other_character_ids_;
  bool byte_fallback_;
  bool fuse_unknown_;
  TokenId unknown_;
  std::unordered_map<std::string_view, TokenId> whole_;  // for ignore_merges; views into the model's tokens
};

/// Per-thread working memory of BpeEncoder: 4 MiB of cache and the arrays of the merge.
struct BpeEncoder::Scratch {
  static constexpr std::size_t kSlots = std::size_t{1} << 16;
  static constexpr std::size_t kKeyBytes = 24;
  static constexpr std::size_t kIds = 9;
  struct alignas(64) Slot {
    std::array<std::uint64_t, 3> key{};  // the piece, padded with zeros
    std::uint16_t length = 0;            // bytes of the piece; 0: free
    std::uint16_t count = 0;
    std::array<TokenId, kIds> ids{};
  };
  struct Candidate {  // for merge_long
    std::uint32_t rank;
    std::uint32_t at;
    TokenId left;
    TokenId right;
    TokenId result;
  };
  struct Node {
    TokenId id;
    std::uint32_t previous;
    std::uint32_t next;
  };

  Scratch() : slots(kSlots) {}
  std::vector<Slot> slots;
  std::vector<Candidate> heap;
  std::vector<Node> nodes;
};

}  // namespace phalanx::data
