// Noise of a router's input in training (Fedus et al., "Switch Transformers", 2021, section 2.2): each number of it is
// multiplied by another one,
//
//   x * u        u uniform in [1 - eps, 1 + eps)
//
// so that tokens near the border between two experts see both. Experts get x as it is, as in Megatron
// (--moe-input-jitter-eps).
//
// u is a pure function of (seed, step, layer, row of the global batch, position, index in x). So it does not depend on
// the layout, and a pass that is computed again has the same.
//
//   mixture.set_jitter({.eps = 1e-2,
//                       .layer = "layers.0.moe",
//                       .place = {.seed = 1, .step = step, .first_row = first_row},
//                       .cut = plan.context_cut(rank)});
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "phalanx/layout/context_cut.h"
#include "phalanx/nn/place_in_run.h"

namespace phalanx::nn {

struct RouterJitter {
  double eps = 0;          // 0: none
  std::string layer = {};  // its name in the model
  PlaceInRun place = {};   // of x
  ContextCut cut = {};     // x has these positions of every sequence
};

/// x [sequences, positions, dim], of a floating type, times the noise: fp32, and x's gradient goes through the product.
/// Not collective. The noise takes as many numbers in fp32 as x has.
/// REQUIRES: with a cut over several ranks an even number of positions, cut.local() of the whole sequence.
at::Tensor with_jitter(const at::Tensor& x, const RouterJitter& jitter);

}  // namespace phalanx::nn
