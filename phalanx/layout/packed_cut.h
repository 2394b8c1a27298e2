// The cut of packed rows: which positions of a row with several documents each rank of a context-parallel group has. It
// uses no tensor.
//
// A position sees keys of its own document alone. So pieces from the head and the tail of such a row (context_cut.h)
// may hold very unequal work: of a row whose one long document is in front, the first rank has little and the last has
// most. Here the row is cut into short blocks, and these are dealt out by their work, which is the number of keys that
// their positions see together:
//
// - A rank has L = padded / ranks positions of the row. A block has b = max(1, L / 8) of them, rounded down; so each
//   rank has L / b blocks, and if b does not divide L, a shorter one, too. The shorter ones are the last of the row.
// - The block with the most work comes first; of equal ones that in front. It goes to the rank with the least work so
//   far that has room for a block of this length; of equal ones to the lowest. All ranks have as many positions.
//
//   4 ranks, documents of 10 and 6 positions:   0 2 2 3 1 3 3 2 1 0   1 3 0 1 0 2     each has 19 of the 76 keys
//
// Every rank works out the same cut, from the row alone.
//
//   const auto ranges = packed_ranges(cut, documents.of_row(0));
//   for (const auto& [first, count] : ranges[rank]) ...                    // in increasing order
//   seen_keys(ranges[rank], documents.of_row(0), cut.window);
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phalanx/layout/context_cut.h"

namespace phalanx {

/// By rank, its positions of one row, in increasing order; blocks that touch are one range. `ends`: where the row's
/// documents begin, and the end of the last one (DocumentBoundaries::of_row). Padding behind it is one more document,
/// and a row that is padded already has the same ranges. Without cut.by_work they are head and tail.
std::vector<std::vector<PositionRange>> packed_ranges(const ContextCut& cut, std::span<const std::int32_t> ends);

/// How many keys these positions of a row see together: those of their document up to themselves, at most `window` (0:
/// all). What is behind the last end is one more document.
std::int64_t seen_keys(std::span<const PositionRange> ranges, std::span<const std::int32_t> ends, std::int64_t window);

}  // namespace phalanx
