// The loss of a row of logits, and its gradient in place.
#pragma once

#include <limits>

#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/gpu/storage.h"

namespace phalanx::kernels::gpu {

/// The largest of some values, and sum(exp(value - largest)).
struct MaxSum {
  float largest, sum;

  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  /// What to subtract from values below: values of -infinity alone sum to 0, not to NaN.
  PHALANX_GPU_FUNCTION float shift() const { return largest == kNone ? 0.0f : largest; }

  template <int N>
  PHALANX_GPU_FUNCTION void add(const Floats<N>& values) {
    float most = values[0];
    PHALANX_UNROLL for (int j = 1; j < N; ++j) most = values[j] > most ? values[j] : most;
    if (most > largest) {
      sum *= exponential(largest - most);
      largest = most;
    }
    const float by = shift();
    PHALANX_UNROLL for (int j = 0; j < N; ++j) sum += exponential(values[j] - by);
  }
  PHALANX_GPU_FUNCTION MaxSum operator+(const MaxSum& other) const {
    MaxSum both{largest > other.largest ? largest : other.largest, 0.0f};
    const float by = both.shift();
    both.sum = sum * exponential(largest - by) + other.sum * exponential(other.largest - by);
    return both;
  }
  template <class F>
  PHALANX_GPU_FUNCTION MaxSum shuffled(F f) const {
    return {f(largest), f(sum)};
  }
};

/// One row a block. Rows need not be aligned: the packs begin at a row's first multiple of 16 bytes.
template <class T>
struct CrossEntropy {
  static constexpr int kLargestBlock = 512, kWidth = 16 / static_cast<int>(sizeof(T)), kBatch = 2;
  int vocab;
  std::int64_t row_stride;
  T* logits;
  const std::int64_t* labels;
  float scale;
  float* loss;

  /// Elements before the packs, packs, and elements behind them.
  struct Parts {
    int before, packs, behind;
  };
  PHALANX_GPU_FUNCTION Parts parts_of(const T* row) const {
    const int offset = static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % 16 / sizeof(T));
    int before = (kWidth - offset) % kWidth;
    before = before < vocab ? before : vocab;
    const int packs = (vocab - before) / kWidth;
    return {before, packs, vocab - before - packs * kWidth};
  }

  PHALANX_GPU_FUNCTION MaxSum sum_of(const T* row, const Parts& parts, int lane, int lanes) const {
    MaxSum sum{MaxSum::kNone, 0.0f};
    const T* const aligned = row + parts.before;
    if (lane < parts.before) sum.add(load_floats<1>(row + lane));
    if (lane < parts.behind) sum.add(load_floats<1>(aligned + parts.packs * kWidth + lane));
    int p = lane;
    for (; p + (kBatch - 1) * lanes < parts.packs; p += kBatch * lanes) {
      Pack<T, kWidth> packs[kBatch];
      PHALANX_UNROLL for (int k = 0; k < kBatch; ++k) packs[k] = load<T, kWidth>(aligned + (p + k * lanes) * kWidth);
      PHALANX_UNROLL for (int k = 0; k < kBatch; ++k) sum.add(floats<T, kWidth>(packs[k]));
    }
    for (; p < parts.packs; p += lanes) sum.add(load_floats<kWidth>(aligned + p * kWidth));
    return sum;
  }

  /// N logits from column `i` on become gradients. factor: scale / sum.
  template <int N>
  PHALANX_GPU_FUNCTION void write(T* row, int i, int label, float shift, float factor) const {
    Floats<N> values = load_floats<N>(row + i);
    PHALANX_UNROLL for (int j = 0; j < N; ++j) {
      values[j] = exponential(values[j] - shift) * factor;
      if (i + j == label) values[j] -= scale;
    }
    store_floats<N>(row + i, values);
  }
  template <int N>
  PHALANX_GPU_FUNCTION void clear(T* row, int i) const {
    store_floats<N>(row + i, Floats<N>{});
  }

  /// Calls f(std::integral_constant<int, N>, column) for this lane's columns of a row, N at a time.
  template <class F>
  PHALANX_GPU_FUNCTION void each_column(const Parts& parts, int lane, int lanes, F f) const {
    if (lane < parts.before) f(std::integral_constant<int, 1>(), lane);
    if (lane < parts.behind) f(std::integral_constant<int, 1>(), parts.before + parts.packs * kWidth + lane);
    for (int p = lane; p < parts.packs; p += lanes) f(std::integral_constant<int, kWidth>(), parts.before + p * kWidth);
  }

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    T* const row = logits + block.index() * row_stride;
    const std::int64_t label = labels[block.index()];
    const Parts parts = parts_of(row);
    if (label < 0 || label >= vocab) {
      block.each_lane([&](int lane) {
        if (lane == 0) {
          loss[block.index()] = label == kIgnoredLabel ? 0.0f : as_float(0x7fc00000u);
        }
        if (scale == 0.0f) return;
        each_column(parts, lane, block.lanes(), [&](auto n, int i) { clear<decltype(n)::value>(row, i); });
      });
      return;
    }
    const float chosen = to_float(row[label]);
    typename Block::template PerLane<MaxSum> sums(block);
    block.each_lane([&](int lane) { sums[lane] = sum_of(row, parts, lane, block.lanes()); });
    const MaxSum sum =
        block.reduce(sums, MaxSum{MaxSum::kNone, 0.0f}, [](const MaxSum& a, const MaxSum& b) { return a + b; });
    block.each_lane([&](int lane) {
      if (lane == 0) loss[block.index()] = logarithm(sum.sum) + sum.largest - chosen;
      if (scale == 0.0f) return;
      const float shift = sum.shift(), factor = scale / sum.sum;
      each_column(parts, lane, block.lanes(),
                  [&](auto n, int i) { write<decltype(n)::value>(row, i, static_cast<int>(label), shift, factor); });
    });
  }
};

}  // namespace phalanx::kernels::gpu
