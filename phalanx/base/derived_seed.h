// Derives independent seeds from one seed, for example for the samples of a job. The derived seeds of one seed, or of
// neighbouring seeds, do not repeat, as they would with seed + index.
//
//   options.seed = derived_seed(job_seed, number);
#pragma once

#include <cstdint>

#include "phalanx/base/philox.h"

namespace phalanx {

/// A function of both arguments. The 64-bit results of all pairs look like independent random draws, so a collision is
/// unlikely.
constexpr std::uint64_t derived_seed(std::uint64_t seed, std::uint64_t index) {
  constexpr std::uint64_t kStream = 0x64657269766564;  // "derived": no stream that is drawn from counts so far
  return PhiloxStream(seed ^ kStream << 8, index).next_u64();
}

}  // namespace phalanx
