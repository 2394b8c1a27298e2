#include "phalanx/data/bpe_encoder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace phalanx::data {
namespace {

constexpr std::size_t kShortPiece = 64;
constexpr std::uint32_t kNoRank = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

/// The first 24 bytes of a piece as three words, zeros after its end.
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
    entries_[at] = {pair, static_cast<std::uint32_t>(rank), merge.result};  // of a pair named twice the later counts
  }
}

BpeEncoder::BpeEncoder(const BpeModel& model) : merges_(model.merges) {
  for (std::size_t id = model.tokens.size(); id-- > 0;) {
    const std::string& token = model.tokens[id];
    if (token.size() == 1) byte_ids_[static_cast<unsigned char>(token[0])] = static_cast<TokenId>(id);
    if (model.ignore_merges && !token.empty()) whole_[token] = static_cast<TokenId>(id);
  }
}

TokenId* BpeEncoder::encode(std::string_view piece, Scratch& scratch, TokenId* out) const {
  if (piece.size() == 1) {
    *out = byte_ids_[static_cast<unsigned char>(piece[0])];
    return out + 1;
  }
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
  if (!whole_.empty()) {
    if (const auto found = whole_.find(piece); found != whole_.end()) {
      *out = found->second;
      return out + 1;
    }
  }
  return piece.size() <= kShortPiece ? merge_short(piece, scratch, out) : merge_long(piece, scratch, out);
}

TokenId* BpeEncoder::merge_short(std::string_view piece, Scratch&, TokenId* out) const {
  TokenId ids[kShortPiece];
  std::uint32_t ranks[kShortPiece];  // of the pair that begins here
  TokenId results[kShortPiece];
  std::size_t count = piece.size();
  const auto look_up = [&](std::size_t i) {
    const MergeTable::Entry* entry = i + 1 < count ? merges_.find(ids[i], ids[i + 1]) : nullptr;
    ranks[i] = entry ? entry->rank : kNoRank;
    results[i] = entry ? entry->result : 0;
  };
  for (std::size_t i = 0; i < count; ++i) ids[i] = byte_ids_[static_cast<unsigned char>(piece[i])];
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
  nodes.resize(piece.size());
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
  const auto size = static_cast<std::uint32_t>(piece.size());
  for (std::uint32_t i = 0; i < size; ++i) {
    nodes[i] = {byte_ids_[static_cast<unsigned char>(piece[i])], i == 0 ? kNone : i - 1, i + 1 == size ? kNone : i + 1};
  }
  for (std::uint32_t i = 0; i < size; ++i) consider(i);
  while (!heap.empty()) {
    const Scratch::Candidate best = heap.front();
    std::pop_heap(heap.begin(), heap.end(), later);
    heap.pop_back();
    Scratch::Node& node = nodes[best.at];
    // Stale when either side has been merged since: a node merged away keeps the id -1.
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
