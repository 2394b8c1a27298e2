// How much of a frozen weight in few bits is wide at a time, in products on the host (kernels/wide_rows.h). Torch-free.
#pragma once

#include <algorithm>
#include <cstdint>

namespace phalanx {

inline constexpr std::int64_t kWideElements = std::int64_t{1} << 20;  // 4 MiB in fp32

/// At least one row.
constexpr std::int64_t wide_rows_at_once(std::int64_t rows, std::int64_t columns) {
  return std::clamp<std::int64_t>(kWideElements / std::max<std::int64_t>(columns, 1), 1,
                                  std::max<std::int64_t>(rows, 1));
}

}  // namespace phalanx
