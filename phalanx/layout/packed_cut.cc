#include "phalanx/layout/packed_cut.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

namespace phalanx {
namespace {

constexpr std::int64_t kBlocksOfRank = 8;

/// The keys that positions [from, to) of a document see, counted from its first.
std::int64_t keys_of(std::int64_t from, std::int64_t to, std::int64_t window) {
  const std::int64_t limit = window > 0 ? window : std::numeric_limits<std::int64_t>::max();
  const auto up_to = [&](std::int64_t count) {  // of its first `count` positions
    const std::int64_t growing = std::min(count, limit);
    return growing * (growing + 1) / 2 + (count - growing) * (count > growing ? limit : 0);
  };
  return up_to(to) - up_to(from);
}

struct Block {
  std::int64_t first = 0, count = 0, work = 0;
};

/// How many blocks of either length a rank still takes.
struct Rank {
  std::int64_t whole = 0, rest = 0, work = 0;
};

std::vector<Block> blocks_of(const ContextCut& cut, std::span<const std::int32_t> ends, std::int64_t length,
                             std::int64_t local) {
  std::vector<Block> blocks;
  const auto add = [&](std::int64_t count) {
    const std::int64_t first = blocks.empty() ? 0 : blocks.back().first + blocks.back().count;
    const PositionRange range{first, count};
    blocks.push_back({.first = first, .count = count, .work = seen_keys({&range, 1}, ends, cut.window)});
  };
  for (std::int64_t i = 0; i < cut.ranks * (local / length); ++i) add(length);
  for (std::int64_t i = 0; local % length != 0 && i < cut.ranks; ++i) add(local % length);
  return blocks;
}

}  // namespace

std::int64_t seen_keys(std::span<const PositionRange> ranges, std::span<const std::int32_t> ends, std::int64_t window) {
  std::int64_t sum = 0;
  for (const auto& [first, count] : ranges) {
    const std::int64_t last = first + count;
    std::int64_t at = first;
    while (at < last) {
      const auto end = std::ranges::upper_bound(ends, ends.front() + at);  // of the document of `at`
      const std::int64_t begin = *(end - 1) - ends.front();
      const std::int64_t to = end == ends.end() ? last : std::min<std::int64_t>(last, *end - ends.front());
      sum += keys_of(at - begin, to - begin, window);
      at = to;
    }
  }
  return sum;
}

std::vector<std::vector<PositionRange>> packed_ranges(const ContextCut& cut, std::span<const std::int32_t> ends) {
  const std::int64_t seq_len = ends.back() - ends.front(), local = cut.local(seq_len);
  std::vector<std::vector<PositionRange>> ranges(static_cast<std::size_t>(cut.ranks));
  if (!cut.by_work) {
    for (std::int64_t rank = 0; rank < cut.ranks; ++rank) {
      const auto pieces = cut.ranges_of(rank, seq_len);
      ranges[static_cast<std::size_t>(rank)].assign(pieces.begin(), pieces.end());
    }
    return ranges;
  }
  const std::int64_t length = std::max<std::int64_t>(1, local / kBlocksOfRank);
  std::vector<Block> blocks = blocks_of(cut, ends, length, local);
  std::ranges::stable_sort(blocks, std::ranges::greater{}, &Block::work);
  std::vector<Rank> ranks(static_cast<std::size_t>(cut.ranks),
                          {.whole = local / length, .rest = local % length != 0 ? 1 : 0});
  for (const Block& block : blocks) {
    const auto room = block.count == length ? &Rank::whole : &Rank::rest;
    Rank* least = nullptr;
    for (Rank& rank : ranks) {
      if (rank.*room > 0 && (least == nullptr || rank.work < least->work)) least = &rank;
    }
    --(least->*room);
    least->work += block.work;
    ranges[static_cast<std::size_t>(least - ranks.data())].push_back({block.first, block.count});
  }
  for (std::vector<PositionRange>& of_rank : ranges) {
    std::ranges::sort(of_rank, {}, &PositionRange::first);
    std::vector<PositionRange> joined;
    for (const PositionRange& range : of_rank) {
      if (!joined.empty() && joined.back().first + joined.back().count == range.first) {
        joined.back().count += range.count;
      } else {
        joined.push_back(range);
      }
    }
    of_rank = std::move(joined);
  }
  return ranges;
}

}  // namespace phalanx
