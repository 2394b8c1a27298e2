#include "phalanx/data/tokenizer/bpe_encoder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "phalanx/base/utf8.h"
#include "phalanx/data/tokenizer/byte_level.h"

namespace phalanx::data {
namespace {

constexpr std::size_t kShortPiece = 64;
constexpr std::uint32_t kNoRank = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

/// The first 24 bytes of a piece as three words, padded with zeros.
std::array<std::uint64_t, 3> piece_key(std::string_view piece) {
  std::array<std::uint64_t, 3> key{};
  const auto load = [&](std::size_t at, std::size_t bytes) {  // bytes: 1 to 8
    std::uint64_t word = 0;
    if (bytes == 8) {
      std::memcpy(&word, piece.data() + at, 8);
    } else if (bytes >= 4) {  // two overlapping halves
      std::uint32_t low, high;
      std::memcpy(&low, piece.data() + at, 4);
      std::memcpy(&high, piece.data() + at + bytes - 4, 4);
      word = low | static_cast<std::uint64_t>(high) << (8 * (bytes - 4));
    } else {
      const auto byte = [&](std::size_t i) {
        return static_cast<std::uint64_t>(static_cast<unsigned char>(piece[at + i]));
      };
      word = byte(0) | byte(bytes / 2) << (8 * (bytes / 2)) | byte(bytes - 1) << (8 * (bytes - 1));
    }
    return word;
  };
  const std::size_t size = piece.size();
  if (size <= 8) {
    key[0] = load(0, size);
  } else if (size <= 16) {
    key[0] = load(0, 8);
    key[1] = load(8, size - 8);
  } else {
    key[0] = load(0, 8);
    key[1] = load(8, 8);
    key[2] = load(16, size - 16);
  }
  return key;
}

std::size_t slot_of(const std::array<std::uint64_t, 3>& key, std::size_t size) {
  std::uint64_t hash = (key[0] ^ size) * 0x9E3779B97F4A7C15ull;
  hash ^= (key[1] ^ std::rotl(hash, 29)) * 0xBF58476D1CE4E5B9ull;
  hash ^= (key[2] ^ std::rotl(hash, 31)) * 0x94D049BB133111EBull;
  return static_cast<std::size_t>((hash ^ hash >> 32) * 0xD6E8FEB86659FD93ull >> 48) &
         (BpeEncoder::Scratch::kSlots - 1);
}

}  // namespace

MergeTable::MergeTable(const std::vector<BpeMerge>& merges) {
  const std::size_t size = std::bit_ceil(std::max<std::size_t>(4, merges.size() * 2 + 2));
  entries_.resize(size);
  mask_ = size - 1;
  shift_ = 64 - std::countr_zero(size);
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const BpeMerge& merge = merges[rank];
    const std::uint64_t pair = key(merge.left, merge.right);
    std::size_t at = place(pair);
    while (entries_[at].pair != pair && entries_[at].pair != kEmpty) at = (at + 1) & mask_;
    entries_[at] = {pair, static_cast<std::uint32_t>(rank), merge.result};  // for a pair named twice the later counts
  }
}

std::array<TokenId, 256> tokens_of_bytes(const BpeModel& model) {
  std::array<TokenId, 256> ids;
  ids.fill(-1);
  // An added token "\n" is matched as a newline in the text, not as the byte that the alphabet writes as U+010A.
  std::unordered_map<TokenId, std::string_view> added;
  for (const AddedToken& token : model.added_tokens) added[token.id] = token.content;
  for (std::size_t id = model.tokens.size(); id-- > 0;) {
    const std::string& token = model.tokens[id];
    if (token.size() != 1) continue;
    const auto found = added.find(static_cast<TokenId>(id));
    if (found != added.end() && found->second != bytes_to_printable(token)) continue;
    ids[static_cast<unsigned char>(token[0])] = static_cast<TokenId>(id);
  }
  return ids;
}

BpeEncoder::BpeEncoder(const BpeModel& model)
    : merges_(model.merges),
      byte_level_(model.is_byte_level()),
      byte_fallback_(model.byte_fallback),
      fuse_unknown_(model.fuse_unknown),
      unknown_(model.unknown.value_or(kNoToken)) {
  std::vector<bool> added(model.tokens.size(), false);  // no piece of ordinary text is one of them
  for (const AddedToken& token : model.added_tokens) {
    if (static_cast<std::size_t>(token.id) < added.size()) added[static_cast<std::size_t>(token.id)] = true;
  }
  byte_ids_.fill(kNoToken);
  if (byte_level_) {
    byte_ids_ = tokens_of_bytes(model);
    lacks_bytes_ = std::ranges::find(byte_ids_, kNoToken) != byte_ids_.end();
  }
  if (!byte_level_) character_ids_.assign(kTableSize, kNoToken);
  for (std::size_t id = model.tokens.size(); id-- > 0;) {
    const std::string& token = model.tokens[id];
    if (token.empty()) continue;
    if (model.ignore_merges && !added[id]) whole_[token] = static_cast<TokenId>(id);
    if (byte_level_) continue;
    const Utf8Char c = first_char(token);
    if (static_cast<std::size_t>(c.length) == token.size()) {
      (c.code_point < kTableSize ? character_ids_[c.code_point] : other_character_ids_[c.code_point]) =
          static_cast<TokenId>(id);
    } else if (const auto byte = fallback_byte(token); byte && token == fallback_token(*byte)) {
      byte_ids_[*byte] = static_cast<TokenId>(id);
    }
  }
  if (byte_level_) return;
  const auto joins_words = [&](const BpeMerge& merge) {
    return model.tokens[static_cast<std::size_t>(merge.right)].starts_with(kMetaspace) &&
           !model.tokens[static_cast<std::size_t>(merge.left)].ends_with(kMetaspace);
  };
  cuts_words_ = character_ids_[first_char(kMetaspace).code_point] != kNoToken &&
                std::none_of(model.merges.begin(), model.merges.end(), joins_words);
}

TokenId* BpeEncoder::encode(std::string_view piece, Scratch& scratch, TokenId* out) const {
  if (piece.empty()) return out;  // has no bytes to look at, and no ids
  if (byte_level_ && piece.size() == 1 && byte_ids_[static_cast<unsigned char>(piece[0])] != kNoToken) {
    *out = byte_ids_[static_cast<unsigned char>(piece[0])];
    return out + 1;
  }
  if (!cuts_words_) return encode_cached(piece, scratch, out);
  if (const auto found = whole_.find(piece); found != whole_.end()) {
    *out = found->second;
    return out + 1;
  }
  for (std::size_t begin = 0; begin < piece.size();) {
    std::size_t end = begin;
    while (piece.substr(end).starts_with(kMetaspace)) end += kMetaspace.size();
    end = std::min(piece.find(kMetaspace, end), piece.size());
    out = encode_cached(piece.substr(begin, end - begin), scratch, out);
    begin = end;
  }
  return out;
}

TokenId* BpeEncoder::encode_cached(std::string_view piece, Scratch& scratch, TokenId* out) const {
  if (piece.size() > Scratch::kKeyBytes) return merge(piece, scratch, out);
  const auto key = piece_key(piece);
  Scratch::Slot& slot = scratch.slots[slot_of(key, piece.size())];
  if (slot.length == piece.size() && slot.key == key) {
    std::memcpy(out, slot.ids.data(), sizeof slot.ids);
    return out + slot.count;
  }
  TokenId* const end = merge(piece, scratch, out);
  const auto count = static_cast<std::size_t>(end - out);
  if (count <= Scratch::kIds) {
    slot.key = key;
    slot.length = static_cast<std::uint16_t>(piece.size());
    slot.count = static_cast<std::uint16_t>(count);
    std::copy(out, end, slot.ids.begin());
  }
  return end;
}

TokenId* BpeEncoder::merge(std::string_view piece, Scratch& scratch, TokenId* out) const {
  if (!whole_.empty() && !cuts_words_) {
    if (const auto found = whole_.find(piece); found != whole_.end()) {
      *out = found->second;
      return out + 1;
    }
  }
  return piece.size() <= kShortPiece ? merge_short(piece, out) : merge_long(piece, scratch, out);
}

std::size_t BpeEncoder::alphabet_ids(std::string_view piece, TokenId* out) const {
  if (!byte_level_) return character_ids(piece, out);
  if (lacks_bytes_) return known_byte_ids(piece, out);
  for (std::size_t i = 0; i < piece.size(); ++i) out[i] = byte_ids_[static_cast<unsigned char>(piece[i])];
  return piece.size();
}

std::size_t BpeEncoder::known_byte_ids(std::string_view piece, TokenId* out) const {
  TokenId* at = out;
  bool after_unknown = false;
  for (const char byte : piece) {
    const TokenId id = byte_ids_[static_cast<unsigned char>(byte)];
    if (id != kNoToken) {
      *at++ = id;
    } else if (unknown_ != kNoToken && !(after_unknown && fuse_unknown_)) {
      *at++ = unknown_;
    }
    after_unknown = id == kNoToken;
  }
  return static_cast<std::size_t>(at - out);
}

TokenId BpeEncoder::id_of_character(std::uint32_t code_point) const {
  if (code_point < kTableSize) return character_ids_[code_point];
  const auto found = other_character_ids_.find(code_point);
  return found == other_character_ids_.end() ? kNoToken : found->second;
}

std::size_t BpeEncoder::character_ids(std::string_view piece, TokenId* out) const {
  TokenId* at = out;
  bool pending = false;  // an unknown token that waits for others to be fused with
  while (!piece.empty()) {
    const Utf8Char c = first_char(piece);
    const std::string_view character = piece.substr(0, c.length > 0 ? static_cast<std::size_t>(c.length) : 1);
    piece.remove_prefix(character.size());
    const TokenId id = c.length > 0 ? id_of_character(c.code_point) : kNoToken;
    if (id != kNoToken) {
      if (std::exchange(pending, false)) *at++ = unknown_;
      *at++ = id;
      continue;
    }
    const auto id_of_byte = [&](char byte) { return byte_ids_[static_cast<unsigned char>(byte)]; };
    if (byte_fallback_ &&
        std::all_of(character.begin(), character.end(), [&](char byte) { return id_of_byte(byte) != kNoToken; })) {
      // A waiting unknown token comes after these, as in the package.
      at = std::transform(character.begin(), character.end(), at, id_of_byte);
    } else if (unknown_ != kNoToken) {
      if (pending && !fuse_unknown_) *at++ = unknown_;
      pending = true;
    }
  }
  if (pending) *at++ = unknown_;
  return static_cast<std::size_t>(at - out);
}

TokenId* BpeEncoder::merge_short(std::string_view piece, TokenId* out) const {
  TokenId ids[kShortPiece];
  std::uint32_t ranks[kShortPiece];  // of the pair that begins at each position
  TokenId results[kShortPiece];
  std::size_t count = alphabet_ids(piece, ids);
  const auto look_up = [&](std::size_t i) {
    const MergeTable::Entry* entry = i + 1 < count ? merges_.find(ids[i], ids[i + 1]) : nullptr;
    ranks[i] = entry ? entry->rank : kNoRank;
    results[i] = entry ? entry->result : 0;
  };
  for (std::size_t i = 0; i < count; ++i) look_up(i);
  while (count > 1) {
    std::size_t best = 0;
    std::uint32_t best_rank = ranks[0];
    for (std::size_t i = 1; i + 1 < count; ++i) {
      if (ranks[i] < best_rank) best_rank = ranks[i], best = i;
    }
    if (best_rank == kNoRank) break;
    ids[best] = results[best];
    --count;
    for (std::size_t i = best + 1; i < count; ++i) {
      ids[i] = ids[i + 1];
      ranks[i] = ranks[i + 1];
      results[i] = results[i + 1];
    }
    look_up(best);
    if (best > 0) look_up(best - 1);
  }
  return std::copy(ids, ids + count, out);
}

TokenId* BpeEncoder::merge_long(std::string_view piece, Scratch& scratch, TokenId* out) const {
  auto& nodes = scratch.nodes;
  auto& heap = scratch.heap;
  const auto size = static_cast<std::uint32_t>(alphabet_ids(piece, out));
  if (size == 0) return out;
  nodes.resize(size);
  heap.clear();
  const auto later = [](const Scratch::Candidate& a, const Scratch::Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  };
  const auto consider = [&](std::uint32_t at) {
    const std::uint32_t next = nodes[at].next;
    if (next == kNone) return;
    const MergeTable::Entry* entry = merges_.find(nodes[at].id, nodes[next].id);
    if (!entry) return;
    heap.push_back({entry->rank, at, nodes[at].id, nodes[next].id, entry->result});
    std::push_heap(heap.begin(), heap.end(), later);
  };
  for (std::uint32_t i = 0; i < size; ++i) {
    nodes[i] = {out[i], i == 0 ? kNone : i - 1, i + 1 == size ? kNone : i + 1};
  }
  for (std::uint32_t i = 0; i < size; ++i) consider(i);
  while (!heap.empty()) {
    const Scratch::Candidate best = heap.front();
    std::pop_heap(heap.begin(), heap.end(), later);
    heap.pop_back();
    Scratch::Node& node = nodes[best.at];
    // Stale if either side has been merged since. A node that was merged away keeps the id -1.
    if (node.id != best.left || node.next == kNone || nodes[node.next].id != best.right) continue;
    const std::uint32_t gone = node.next;
    node.id = best.result;
    node.next = nodes[gone].next;
    nodes[gone].id = -1;
    if (node.next != kNone) nodes[node.next].previous = best.at;
    consider(best.at);
    if (node.previous != kNone) consider(node.previous);
  }
  for (std::uint32_t at = 0; at != kNone; at = nodes[at].next) *out++ = nodes[at].id;
  return out;
}

}  // namespace phalanx::data
