// Counts of what the tokens of a pass chose, by expert: whole numbers, so that sums over ranks have the same bits in
// any order. On a device nothing waits for them.
//
//   const at::Tensor counts = count_choices(chosen.view({sequences, -1}), experts);   // [sequences, experts]
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace phalanx::nn {

/// How often each expert is in each row of `chosen`, int64 [rows, n] in any order: int64 [rows, experts].
/// REQUIRES: 0 <= chosen < experts.
at::Tensor count_choices(const at::Tensor& chosen, std::int64_t experts);

/// How often each number below `count` is in `sorted`, int64 [n] in increasing order: int64 [count]. Larger numbers are
/// not counted. REQUIRES: 0 <= sorted.
at::Tensor count_each(const at::Tensor& sorted, std::int64_t count);

/// int32 [count]: how many numbers are at most 0, 1, ...: where each one ends in `sorted`, as of count_each().
at::Tensor end_of_each(const at::Tensor& sorted, std::int64_t count);

}  // namespace phalanx::nn
