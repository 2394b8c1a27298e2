// AttentionQueries: the queries of a call of causal attention, and the keys that each of them sees.
//
// Queries may be those of some positions of a sequence only, and so may the keys. Each range of queries meets one or
// several documents, and each such part that sees some of the keys is a segment. Rows of documents may have queries at
// positions of their own.
//
//   for_each_segment(queries, /*row=*/0, [&](const QuerySegment& s) { ... });
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "phalanx/layout/context_cut.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::kernels {

struct AttentionQueries {
  using Ranges = std::vector<PositionRange>;
  Ranges ranges;         // the positions of the queries, in the order of the queries; increasing
  std::int64_t seq = 0;  // the length of a row
  std::shared_ptr<const DocumentBoundaries> documents = nullptr;  // of rows of this length; null: each row is one
  std::int64_t window = 0;                  // a query sees its own key and window - 1 before it; 0: all before it
  std::optional<PositionRange> keys = {};   // the positions of the keys; unset: all
  std::vector<Ranges> ranges_of_rows = {};  // in place of `ranges`, by row, with as many queries in each; empty: none

  /// All positions.
  static AttentionQueries all(std::int64_t seq, std::shared_ptr<const DocumentBoundaries> documents,
                              std::int64_t window = 0) {
    return {.ranges = {{0, seq}}, .seq = seq, .documents = std::move(documents), .window = window};
  }
  PositionRange key_positions() const noexcept { return keys.value_or(PositionRange{0, seq}); }
  std::int64_t count() const noexcept {
    std::int64_t sum = 0;
    for (const auto& range : ranges) sum += range.count;
    return sum;
  }
  const Ranges& ranges_of(std::int64_t row) const {
    return ranges_of_rows.empty() ? ranges : ranges_of_rows.at(static_cast<std::size_t>(row));
  }
  /// An upper bound of the keys that `queries` consecutive queries see together.
  std::int64_t widest(std::int64_t queries) const noexcept {
    const std::int64_t width = std::min(documents ? documents->longest() : seq, key_positions().count);
    return window > 0 ? std::min(width, window - 1 + queries) : width;
  }
};

/// Consecutive queries of one document. Query i of them sees keys from key + max(0, before + i + 1 - window) to
/// key + min(before + i, keys - 1), at least one.
struct QuerySegment {
  std::int64_t query = 0;   // the first one, counted in the queries
  std::int64_t key = 0;     // the first key that it sees, counted in the keys
  std::int64_t before = 0;  // positions from that key to the first query
  std::int64_t count = 0;   // of queries
  std::int64_t keys = 0;    // that some of them see
};

template <class Use>
void for_each_segment(const AttentionQueries& queries, std::int64_t row, const Use& use) {
  const PositionRange held = queries.key_positions();
  const std::int64_t window = queries.window;
  std::int64_t query = 0;
  for (const PositionRange& range : queries.ranges_of(row)) {
    const std::int64_t first = range.first, count = range.count;
    const auto meet = [&](std::int64_t begin, std::int64_t end) {
      std::int64_t key = std::max(begin, held.first);
      const std::int64_t last = std::min(end, held.first + held.count) - 1, from = std::max(first, key);
      std::int64_t to = std::min(first + count, end);
      if (window > 0) to = std::min(to, last + window);
      if (key > last || from >= to) return;
      if (window > 0) key = std::max(key, from + 1 - window);
      use(QuerySegment{.query = query + from - first,
                       .key = key - held.first,
                       .before = from - key,
                       .count = to - from,
                       .keys = std::min(last + 1, to) - key});
    };
    if (!queries.documents) {
      meet(0, queries.seq);
    } else {
      const auto ends = queries.documents->of_row(row);
      for (std::size_t i = 0; i + 1 < ends.size(); ++i)
        meet(ends[i] - row * queries.seq, ends[i + 1] - row * queries.seq);
    }
    query += count;
  }
}

/// The same for runs of rows: use(first row, rows, segment). Without documents all rows are alike, and are one run.
template <class Use>
void for_each_segment_of_rows(const AttentionQueries& queries, std::int64_t rows, const Use& use) {
  if (!queries.documents) return for_each_segment(queries, 0, [&](const QuerySegment& s) { use(0, rows, s); });
  for (std::int64_t row = 0; row < rows; ++row) {
    for_each_segment(queries, row, [&](const QuerySegment& s) { use(row, 1, s); });
  }
}

}  // namespace phalanx::kernels
