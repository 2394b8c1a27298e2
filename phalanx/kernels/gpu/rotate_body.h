// Rotary position embeddings: pairs of elements, half a head apart.
#pragma once

#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/gpu/storage.h"

namespace phalanx::kernels::gpu {

/// A few positions a block, so that the heads share the angles in the cache; one job in each row of blocks.
template <class T, int kWidth>
struct Rotate {
  static constexpr int kLargestBlock = 128, kPositions = 4;
  RotateJob jobs[2];
  RotateAngles angles;
  int positions, seq, half;

  PHALANX_GPU_FUNCTION void rotate(const T* from, T* to, const float* cos, const float* sin) const {
    const Floats<kWidth> a = load_floats<kWidth>(from), b = load_floats<kWidth>(from + half);
    const Floats<kWidth> c = load_floats<kWidth>(cos), s = load_floats<kWidth>(sin);
    Floats<kWidth> first, second;
    PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) {
      const float signed_sin = s[j] * angles.sin_sign;
      first[j] = a[j] * c[j] - b[j] * signed_sin;
      second[j] = b[j] * c[j] + a[j] * signed_sin;
    }
    store_floats<kWidth>(to, first);
    store_floats<kWidth>(to + half, second);
  }

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    const RotateJob& job = jobs[block.index_y()];
    const int packs = half / kWidth, heads = static_cast<int>(job.heads), items = kPositions * heads * packs;
    const int first = static_cast<int>(block.index()) * kPositions;
    block.each_lane([&](int lane) {
      for (int item = lane; item < items; item += block.lanes()) {
        const int vector = item / packs, element = (item - vector * packs) * kWidth;
        const int at = vector / heads, head = vector - at * heads;
        if (at >= positions - first) break;
        const int position = first + at, row = position / seq, t = position - row * seq;
        const std::int64_t angle = static_cast<std::int64_t>(angles.per_row ? position : t) * half + element;
        const std::int64_t x = row * job.batch_stride + t * job.position_stride + head * job.head_stride + element;
        const std::int64_t y = (position * job.heads + head) * 2 * half + element;
        rotate(static_cast<const T*>(job.x) + x, static_cast<T*>(job.y) + y, angles.cos + angle, angles.sin + angle);
      }
    });
  }
};

}  // namespace phalanx::kernels::gpu
