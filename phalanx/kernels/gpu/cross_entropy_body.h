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

  /// Calls f(pack, column) for this lane's columns of a row, each a pack of one or of kWidth logits, which are read
  /// several packs ahead.
  template <class F>
  PHALANX_GPU_FUNCTION void each_pack(const T* row, int lane, int lanes, F f) const {
    const Parts parts = parts_of(row);
    const int behind = parts.before + parts.packs * kWidth;
    if (lane < parts.before) f(load<T, 1>(row + lane), lane);
    if (lane < parts.behind) f(load<T, 1>(row + behind + lane), behind + lane);
    int p = lane;
    for (; p + (kBatch - 1) * lanes < parts.packs; p += kBatch * lanes) {
      Pack<T, kWidth> packs[kBatch];
      PHALANX_UNROLL for (int k = 0; k < kBatch; ++k) {
        packs[k] = load<T, kWidth>(row + parts.before + (p + k * lanes) * kWidth);
      }
      PHALANX_UNROLL for (int k = 0; k < kBatch; ++k) f(packs[k], parts.before + (p + k * lanes) * kWidth);
    }
    for (; p < parts.packs; p += lanes) {
      const int i = parts.before + p * kWidth;
      f(load<T, kWidth>(row + i), i);
    }
  }

  /// The gradients of N logits, from column `i` on. factor: scale / sum.
  template <int N>
  PHALANX_GPU_FUNCTION Floats<N> gradients_of(Floats<N> values, int i, int label, float shift, float factor) const {
    PHALANX_UNROLL for (int j = 0; j < N; ++j) {
      values[j] = exponential(values[j] - shift) * factor;
      if (i + j == label) values[j] -= scale;
    }
    return values;
  }

  template <class Block>
  PHALANX_GPU_FUNCTION void without_label(Block& block, T* row, float row_loss) const {
    block.each_lane([&](int lane) {
      if (lane == 0) loss[block.index()] = row_loss;
      for (int i = lane; i < vocab && scale != 0.0f; i += block.lanes()) row[i] = from_float<T>(0.0f);
    });
  }

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    T* const row = logits + block.index() * row_stride;
    const std::int64_t label = labels[block.index()];
    if (label < 0 || label >= vocab) {
      without_label(block, row, label == kIgnoredLabel ? 0.0f : as_float(0x7fc00000u));
      return;
    }
    const float chosen = to_float(row[label]);
    typename Block::template PerLane<MaxSum> sums(block);
    block.each_lane([&](int lane) {
      MaxSum sum{MaxSum::kNone, 0.0f};
      each_pack(row, lane, block.lanes(), [&](const auto& pack, int) { sum.add(floats(pack)); });
      sums[lane] = sum;
    });
    const MaxSum sum =
        block.reduce(sums, MaxSum{MaxSum::kNone, 0.0f}, [](const MaxSum& a, const MaxSum& b) { return a + b; });
    block.each_lane([&](int lane) {
      if (lane == 0) loss[block.index()] = logarithm(sum.sum) + sum.largest - chosen;
      if (scale == 0.0f) return;
      const float shift = sum.shift(), factor = scale / sum.sum;
      each_pack(row, lane, block.lanes(), [&](const auto& pack, int i) {
        store_floats(row + i, gradients_of(floats(pack), i, static_cast<int>(label), shift, factor));
      });
    });
  }
};

}  // namespace phalanx::kernels::gpu
