// Noise of a router's input in training (Fedus et al., "Switch Transformers", 2021, section 2.2): each number of it is
// multiplied by another one,
//
//   x * u        u uniform in [1 - eps, 1 + eps)
//
// so that tokens near the border between two experts see both. Experts get x as it is, as in Megatron
// (--moe-input-jitter-eps).
//
// u is a pure function of (seed, step, layer, row of the global batch, position, index in x). So it does not depend on the
// layout, and a pass that is computed again has the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "phalanx/layout/context_cut.h"

namespace phalanx::nn {

struct RouterJitter {
  double eps = 0;  // 0: none
  std::uint64_t seed = 0;
  std::string layer = {};      // its name in the model
  std::int64_t step = 0;       // of the optimizer
  std::int64_t first_row = 0;  // of x in the global batch of this step
  ContextCut cut = {};         // x has these positions of every sequence
};

/// x [sequences, positions, dim] times the noise, in fp32.
at::Tensor with_jitter(const at::Tensor& x, const RouterJitter& jitter);

}  // namespace phalanx::nn
