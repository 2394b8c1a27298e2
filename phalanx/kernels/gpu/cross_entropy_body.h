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

  template <class T, int N, int kPacks>
  PHALANX_GPU_FUNCTION void add(const Pack<T, N> (&packs)[kPacks]) {
    float most = floats(packs[0])[0];
    PHALANX_UNROLL for (int k = 0; k < kPacks; ++k) {
      const Floats<N> values = floats(packs[k]);
      PHALANX_UNROLL for (int j = 0; j < N; ++j) most = values[j] > most ? values[j] : most;
    }
    if (most > largest) {
      sum *= exponential(largest - most);
      largest = most;
    }
    const float by = shift();
    PHALANX_UNROLL for (int k = 0; k < kPacks; ++k) {
      const Floats<N> values = floats(packs[k]);
      PHALANX_UNROLL for (int j = 0; j < N; ++j) sum += exponential(values[j] - by);
    }
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

/// One row a block, and one block a multiprocessor, so that a GPU's cache holds much of the rows between the two passes
/// over them. The second pass runs backwards and begins with what was read last.
///
/// Rows need not be aligned: the packs begin at a row's first multiple of 16 bytes.
template <class T>
struct CrossEntropy {
  static constexpr int kLargestBlock = 1024, kWidth = 16 / static_cast<int>(sizeof(T)), kBatch = 4;
  int vocab;
  std::int64_t row_stride;
  T* logits;
  const std::int64_t* labels;
  float scale, z_weight;
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

  template <int N>
  PHALANX_GPU_FUNCTION static void add_one(MaxSum& sum, const T* from) {
    const Pack<T, N> pack[1] = {load<T, N>(from)};
    sum.add(pack);
  }

  PHALANX_GPU_FUNCTION MaxSum sum_of(const T* row, int lane, int lanes) const {
    const Parts parts = parts_of(row);
    MaxSum sum{MaxSum::kNone, 0.0f};
    const T* const aligned = row + parts.before;
    if (lane < parts.before) add_one<1>(sum, row + lane);
    int p = lane;
    for (; p + (kBatch - 1) * lanes < parts.packs; p += kBatch * lanes) {
      Pack<T, kWidth> packs[kBatch];
      PHALANX_UNROLL for (int k = 0; k < kBatch; ++k) packs[k] = load<T, kWidth>(aligned + (p + k * lanes) * kWidth);
      sum.add(packs);
    }
    for (; p < parts.packs; p += lanes) add_one<kWidth>(sum, aligned + p * kWidth);
    if (lane < parts.behind) add_one<1>(sum, aligned + parts.packs * kWidth + lane);
    return sum;
  }

  struct Gradient {
    float shift, factor, scale;  // factor: scale / sum, without a z-loss
    int label;
  };

  /// Stores the gradients of N logits, from column `i` on.
  template <int N>
  PHALANX_GPU_FUNCTION static void write(T* row, int i, const Pack<T, N>& logits, const Gradient& gradient) {
    Floats<N> values = floats(logits);
    PHALANX_UNROLL for (int j = 0; j < N; ++j) {
      values[j] = exponential(values[j] - gradient.shift) * gradient.factor;
      if (i + j == gradient.label) values[j] -= gradient.scale;
    }
    store<T, N, Caching::streamed>(row + i, pack_of<T, N>(values));
  }

  PHALANX_GPU_FUNCTION void write_row(T* row, int lane, int lanes, const Gradient& gradient) const {
    const Parts parts = parts_of(row);
    const int behind = parts.before + parts.packs * kWidth;
    if (lane < parts.behind) write(row, behind + lane, load<T, 1>(row + behind + lane), gradient);
    int left = lane < parts.packs ? (parts.packs - lane + lanes - 1) / lanes : 0;  // packs of this lane
    for (; left >= kBatch; left -= kBatch) {
      Pack<T, kWidth> packs[kBatch];
      const int last = parts.before + (lane + (left - 1) * lanes) * kWidth;
      PHALANX_UNROLL for (int k = 0; k < kBatch; ++k) packs[k] = load<T, kWidth>(row + last - k * lanes * kWidth);
      PHALANX_UNROLL for (int k = 0; k < kBatch; ++k) write(row, last - k * lanes * kWidth, packs[k], gradient);
    }
    for (; left > 0; --left) {
      const int i = parts.before + (lane + (left - 1) * lanes) * kWidth;
      write(row, i, load<T, kWidth>(row + i), gradient);
    }
    if (lane < parts.before) write(row, lane, load<T, 1>(row + lane), gradient);
  }

  template <class Block>
  PHALANX_GPU_FUNCTION void without_label(Block& block, T* row, float row_loss) const {
    block.each_lane([&](int lane) {
      if (lane == 0) loss[block.index()] = row_loss;
      for (int i = lane; i < vocab && scale != 0.0f; i += block.lanes()) row[i] = from_float<T>(row_loss);
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
    block.each_lane([&](int lane) { sums[lane] = sum_of(row, lane, block.lanes()); });
    const MaxSum sum =
        block.reduce(sums, MaxSum{MaxSum::kNone, 0.0f}, [](const MaxSum& a, const MaxSum& b) { return a + b; });
    block.each_lane([&](int lane) {
      const float z = logarithm(sum.sum) + sum.largest;
      if (lane == 0) loss[block.index()] = z_weight == 0.0f ? z - chosen : z - chosen + z_weight * z * z;
      if (scale == 0.0f) return;
      const float of_softmax = z_weight == 0.0f ? scale : scale * (1.0f + 2.0f * z_weight * z);
      const Gradient gradient{sum.shift(), of_softmax / sum.sum, scale, static_cast<int>(label)};
      write_row(row, lane, block.lanes(), gradient);
    });
  }
};

}  // namespace phalanx::kernels::gpu
