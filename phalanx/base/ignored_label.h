// The label of a token that has no loss, in data, kernels and models: torch's default ignore_index.
#pragma once

#include <cstdint>

namespace phalanx {

inline constexpr std::int64_t kIgnoredLabel = -100;

}  // namespace phalanx
