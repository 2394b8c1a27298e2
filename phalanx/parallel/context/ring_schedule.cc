#include "phalanx/parallel/context/ring_schedule.h"

#include <algorithm>

namespace phalanx {
namespace {

/// The last position whose query sees one of the keys up to `last`, which is the last of them.
std::int64_t last_query_of(std::int64_t last, std::int64_t seq_len, std::int64_t window,
                           const DocumentBoundaries* documents) {
  std::int64_t furthest = documents != nullptr ? last : seq_len - 1;
  for (std::int64_t row = 0; documents != nullptr && row < documents->rows(); ++row) {
    const auto ends = documents->of_row(row);
    const auto end = std::ranges::upper_bound(ends, row * seq_len + last);  // of the document that the key is in
    furthest = std::max<std::int64_t>(furthest, *end - 1 - row * seq_len);
  }
  return window > 0 ? std::min(furthest, last + window - 1) : furthest;
}

}  // namespace

RingSchedule::RingSchedule(const ContextCut& cut, std::int64_t seq_len, std::int64_t window,
                           const DocumentBoundaries* documents)
    : ranks_(cut.ranks), length_(seq_len / (2 * cut.ranks)) {
  for (std::int64_t piece = 0; piece < 2 * ranks_; ++piece) {
    furthest_.push_back(last_query_of((piece + 1) * length_ - 1, seq_len, window, documents) / length_);
  }
  for (const Way way : kWays) {
    for (std::int64_t owner = 0; owner < ranks_; ++owner) {
      std::int64_t last = 0;
      for (std::int64_t hop = 1; hop < ranks_; ++hop) {
        const std::int64_t rank = rank_at(way, owner, hop);
        if ((way == up || hop <= owner) && !queries(way, owner, rank).empty()) last = hop;
      }
      last_hops_[way].push_back(last);
      hops_ = std::max(hops_, last);
    }
  }
}

std::optional<std::int64_t> RingSchedule::owner_at(Way way, std::int64_t rank, std::int64_t hop) const {
  const std::int64_t owner = way == up ? (rank - hop + ranks_) % ranks_ : rank + hop;
  if (hop >= ranks_ || owner >= ranks_ || hop > last_hop(way, owner)) return std::nullopt;
  return owner;
}

std::int64_t RingSchedule::rank_at(Way way, std::int64_t owner, std::int64_t hop) const {
  return (owner + (way == up ? hop : -hop) + ranks_) % ranks_;
}

PositionRange RingSchedule::keys(Way way, std::int64_t owner) const {
  return {piece_of(way, owner) * length_, length_};
}

std::vector<PositionRange> RingSchedule::queries(Way way, std::int64_t owner, std::int64_t rank) const {
  const std::int64_t piece = piece_of(way, owner);
  std::vector<PositionRange> ranges;
  for (const Way own : kWays) {
    const std::int64_t mine = piece_of(own, rank);
    if (mine >= piece && mine <= furthest_[static_cast<std::size_t>(piece)])
      ranges.push_back({mine * length_, length_});
  }
  return ranges;
}

}  // namespace phalanx
