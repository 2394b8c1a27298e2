// Seeds of the parts of something that has one seed: samples of a job, say. Neither the parts of one seed nor those of
// neighbouring seeds share any, as they would with seed + index.
//
//   options.seed = derived_seed(job_seed, number);
#pragma once

#include <cstdint>

#include "phalanx/base/philox.h"

namespace phalanx {

/// A function of both that is hard to meet twice: the 64-bit words of all pairs look like independent draws.
constexpr std::uint64_t derived_seed(std::uint64_t seed, std::uint64_t index) {
  constexpr std::uint64_t kStream = 0x64657269766564;  // "derived": no stream that is drawn from counts so far
  return PhiloxStream(seed ^ kStream << 8, index).next_u64();
}

}  // namespace phalanx
