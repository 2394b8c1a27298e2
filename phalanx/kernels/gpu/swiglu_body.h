// y = silu(gate) * up, forwards and backwards.
#pragma once

#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/gpu/storage.h"

namespace phalanx::kernels::gpu {

/// The part of a row that a block computes: kPacks packs a lane.
template <int kWidth, int kPacks>
struct RowOfBlocks {
  std::int64_t width;
  int blocks;  // of a row

  template <class Block>
  PHALANX_GPU_FUNCTION std::int64_t row(const Block& block) const {
    return static_cast<int>(block.index()) / blocks;
  }
  template <class Block>
  PHALANX_GPU_FUNCTION std::int64_t begin(const Block& block, int lane) const {
    const std::int64_t in_row = static_cast<int>(block.index()) % blocks;
    return (in_row * kPacks * block.lanes() + lane) * kWidth;
  }
};

template <class T, int kWidth>
struct Swiglu {
  static constexpr int kLargestBlock = 256, kPacks = 2;
  RowOfBlocks<kWidth, kPacks> place;
  const T* gate;
  const T* up;
  T* y;
  std::int64_t gate_stride, up_stride;

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    const std::int64_t row = place.row(block);
    block.each_lane([&](int lane) {
      const std::int64_t begin = place.begin(block, lane), stride = block.lanes() * kWidth;
      Pack<T, kWidth> gates[kPacks], ups[kPacks];
      PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
        const std::int64_t i = begin + p * stride;
        if (i >= place.width) continue;
        gates[p] = load<T, kWidth>(gate + row * gate_stride + i);
        ups[p] = load<T, kWidth>(up + row * up_stride + i);
      }
      PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
        const std::int64_t i = begin + p * stride;
        if (i >= place.width) continue;
        const Floats<kWidth> g = floats<T, kWidth>(gates[p]), u = floats<T, kWidth>(ups[p]);
        Floats<kWidth> result;
        PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) {
          result[j] = quotient<T>(g[j], 1.0f + exponential(-g[j])) * u[j];
        }
        store_floats<kWidth>(y + row * place.width + i, result);
      }
    });
  }
};

template <class T, int kWidth>
struct SwigluBackward {
  static constexpr int kLargestBlock = 256, kPacks = 2;
  RowOfBlocks<kWidth, kPacks> place;
  const T* gate;
  const T* up;
  const T* dy;
  T* dgate;
  T* dup;
  T* y;  // or nullptr
  std::int64_t gate_stride, up_stride, dgate_stride, dup_stride;

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    const std::int64_t row = place.row(block);
    block.each_lane([&](int lane) {
      const std::int64_t begin = place.begin(block, lane), stride = block.lanes() * kWidth;
      Pack<T, kWidth> gates[kPacks], ups[kPacks], dys[kPacks];
      PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
        const std::int64_t i = begin + p * stride;
        if (i >= place.width) continue;
        gates[p] = load<T, kWidth>(gate + row * gate_stride + i);
        ups[p] = load<T, kWidth>(up + row * up_stride + i);
        dys[p] = load<T, kWidth>(dy + row * place.width + i);
      }
      PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
        const std::int64_t i = begin + p * stride;
        if (i < place.width) write(gates[p], ups[p], dys[p], row, i);
      }
    });
  }

  PHALANX_GPU_FUNCTION void write(const Pack<T, kWidth>& gates, const Pack<T, kWidth>& ups, const Pack<T, kWidth>& dys,
                                  std::int64_t row, std::int64_t i) const {
    const Floats<kWidth> g = floats<T, kWidth>(gates), u = floats<T, kWidth>(ups), d = floats<T, kWidth>(dys);
    Floats<kWidth> dg, du, product;
    PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) {
      const float sigmoid = quotient<T>(1.0f, 1.0f + exponential(-g[j])), silu = g[j] * sigmoid;
      product[j] = silu * u[j];
      du[j] = d[j] * silu;
      dg[j] = d[j] * u[j] * (sigmoid + silu * (1.0f - sigmoid));
    }
    store_floats<kWidth>(dgate + row * dgate_stride + i, dg);
    store_floats<kWidth>(dup + row * dup_stride + i, du);
    if (y != nullptr) store_floats<kWidth>(y + row * place.width + i, product);
  }
};

}  // namespace phalanx::kernels::gpu
