// h = x + delta: the end of a residual layer.
#pragma once

#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/gpu/storage.h"

namespace phalanx::kernels::gpu {

template <class X, class Delta, int kWidth>
struct AddDelta {
  static constexpr int kLargestBlock = 256, kPacks = 2;
  std::int64_t count;
  const X* x;
  const Delta* delta;
  X* h;

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    block.each_lane([&](int lane) {
      const std::int64_t begin = (block.index() * kPacks * block.lanes() + lane) * kWidth;
      const std::int64_t stride = block.lanes() * kWidth;
      Pack<X, kWidth> xs[kPacks];
      Pack<Delta, kWidth> deltas[kPacks];
      PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
        const std::int64_t i = begin + p * stride;
        if (i >= count) continue;
        xs[p] = load<X, kWidth>(x + i);
        deltas[p] = load<Delta, kWidth>(delta + i);
      }
      PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
        const std::int64_t i = begin + p * stride;
        if (i >= count) continue;
        Floats<kWidth> sum = floats<X, kWidth>(xs[p]);
        const Floats<kWidth> more = floats<Delta, kWidth>(deltas[p]);
        PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) sum[j] += more[j];
        store_floats<kWidth>(h + i, sum);
      }
    });
  }
};

}  // namespace phalanx::kernels::gpu
