// AttentionQueries: the queries of a call of causal attention, and the keys that each of them sees.
//
// Queries may be those of some positions of a sequence only, with the keys of all its positions: then each range of
// positions meets one or several documents, and each such part is a segment.
//
//   for_each_segment(queries, /*row=*/0, [&](const QuerySegment& s) { ... });
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "phalanx/layout/context_cut.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::kernels {

struct AttentionQueries {
  std::vector<PositionRange> ranges;  // the positions of the queries, in the order of the queries; increasing
  std::int64_t keys = 0;              // the length of a row of keys
  std::shared_ptr<const DocumentBoundaries> documents = nullptr;  // of the rows of keys; null: each row is one

  /// All positions.
  static AttentionQueries all(std::int64_t seq, std::shared_ptr<const DocumentBoundaries> documents) {
    return {.ranges = {{0, seq}}, .keys = seq, .documents = std::move(documents)};
  }
  bool is_all() const noexcept { return ranges.size() == 1 && ranges[0] == PositionRange{0, keys}; }
  std::int64_t count() const noexcept {
    std::int64_t sum = 0;
    for (const auto& range : ranges) sum += range.count;
    return sum;
  }
  /// An upper bound of the keys that one query sees.
  std::int64_t longest() const noexcept { return documents ? documents->longest() : keys; }
};

/// Consecutive queries of one document. Query i of them sees keys [key, key + before + i].
struct QuerySegment {
  std::int64_t query = 0;   // the first one, counted in the queries
  std::int64_t key = 0;     // the first key of their document
  std::int64_t before = 0;  // keys of the document before the key of the first query
  std::int64_t count = 0;
};

template <class Use>
void for_each_segment(const AttentionQueries& queries, std::int64_t row, const Use& use) {
  std::int64_t query = 0;
  for (const PositionRange& range : queries.ranges) {
    const std::int64_t first = range.first, count = range.count;
    const auto meet = [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t from = std::max(first, begin), to = std::min(first + count, end);
      if (from < to) {
        use(QuerySegment{.query = query + from - first, .key = begin, .before = from - begin, .count = to - from});
      }
    };
    if (!queries.documents) {
      meet(0, queries.keys);
    } else {
      const auto ends = queries.documents->of_row(row);
      for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
        meet(ends[i] - row * queries.keys, ends[i + 1] - row * queries.keys);
      }
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
