// The normalisation of rows, forwards and backwards.
#pragma once

#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/gpu/storage.h"

namespace phalanx::kernels::gpu {

struct Add {
  template <class T>
  PHALANX_GPU_FUNCTION T operator()(T a, T b) const {
    return a + b;
  }
};

/// A lane's part of a row: kPacks packs, `stride` elements apart, from element `begin` on.
template <class T, int kWidth, int kPacks>
struct RowPart {
  Pack<T, kWidth> packs[kPacks];

  PHALANX_GPU_FUNCTION void read(const T* row, int begin, int stride, int dim) {
    PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
      const int i = begin + p * stride;
      if (i < dim) packs[p] = load<T, kWidth>(row + i);
    }
  }
  PHALANX_GPU_FUNCTION Floats<kWidth> operator[](int p) const { return floats<T, kWidth>(packs[p]); }
};

/// For values that every row reads and that stay in the cache.
template <int kWidth>
PHALANX_GPU_FUNCTION Floats<kWidth> load_floats(Type type, const void* from, int i) {
  if (type == Type::f32) return load_floats<kWidth>(static_cast<const float*>(from) + i);
  if (type == Type::bf16) return load_floats<kWidth>(static_cast<const Bf16*>(from) + i);
  return load_floats<kWidth>(static_cast<const F16*>(from) + i);
}

/// One row a block. kKept: a lane's part of it is one RowPart, which stays in registers; else the row is read twice.
template <class X, class Y, int kWidth, int kPacks, bool kKept>
struct RmsNorm {
  static constexpr int kLargestBlock = 512;
  static constexpr bool kShortRows = kKept;
  int dim;
  float eps;
  const X* x;
  Type delta_type;
  const void* delta;  // or nullptr; then h is not written
  X* h;
  Type weight_type;
  const void* weight;
  Y* y;
  float* inverse_rms;

  using Part = RowPart<X, kWidth, kPacks>;

  template <class Delta>
  PHALANX_GPU_FUNCTION void add(Part& part, const Delta* delta_row, X* h_row, int begin, int stride) const {
    RowPart<Delta, kWidth, kPacks> deltas;
    deltas.read(delta_row, begin, stride, dim);
    PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
      const int i = begin + p * stride;
      if (i >= dim) continue;
      Floats<kWidth> sum = part[p];
      const Floats<kWidth> more = deltas[p];
      PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) sum[j] += more[j];
      part.packs[p] = pack_of<X, kWidth>(sum);
      store<X, kWidth>(h_row + i, part.packs[p]);
    }
  }

  PHALANX_GPU_FUNCTION void read_sum(Part& part, std::int64_t row, int begin, int stride) const {
    part.read(x + row, begin, stride, dim);
    if (delta == nullptr) return;
    if (delta_type == Type::f32) {
      add(part, static_cast<const float*>(delta) + row, h + row, begin, stride);
    } else if (delta_type == Type::bf16) {
      add(part, static_cast<const Bf16*>(delta) + row, h + row, begin, stride);
    } else {
      add(part, static_cast<const F16*>(delta) + row, h + row, begin, stride);
    }
  }

  PHALANX_GPU_FUNCTION float squares_of(const Part& part, int begin, int stride) const {
    float sum = 0.0f;
    PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
      if (begin + p * stride >= dim) continue;
      const Floats<kWidth> values = part[p];
      PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) sum += values[j] * values[j];
    }
    return sum;
  }

  PHALANX_GPU_FUNCTION void write(const Part& part, float inverse, std::int64_t row, int begin, int stride) const {
    PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
      const int i = begin + p * stride;
      if (i >= dim) continue;
      Floats<kWidth> values = part[p];
      const Floats<kWidth> weights = load_floats<kWidth>(weight_type, weight, i);
      PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) values[j] *= inverse;
      values = rounded_to<X>(values);
      PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) values[j] *= weights[j];
      store_floats<kWidth>(y + row + i, values);
    }
  }

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    typename Block::template PerLane<Part> parts(block);
    typename Block::template PerLane<float> sums(block);
    const std::int64_t row = block.index() * dim;
    const int stride = block.lanes() * kWidth;
    block.each_lane([&](int lane) {
      sums[lane] = 0.0f;
      for (int begin = lane * kWidth; begin < dim; begin += stride * kPacks) {
        read_sum(parts[lane], row, begin, stride);
        sums[lane] += squares_of(parts[lane], begin, stride);
        if constexpr (kKept) break;
      }
    });
    const float inverse = 1.0f / square_root(block.reduce(sums, 0.0f, Add()) / static_cast<float>(dim) + eps);
    block.each_lane([&](int lane) {
      if (lane == 0) inverse_rms[block.index()] = inverse;
      for (int begin = lane * kWidth; begin < dim; begin += stride * kPacks) {
        if constexpr (!kKept) parts[lane].read((delta == nullptr ? x : h) + row, begin, stride, dim);
        write(parts[lane], inverse, row, begin, stride);
        if constexpr (kKept) break;
      }
    });
  }
};

/// A range of rows a block. kKept: as above, and so are the weights and the sums of the weight's gradient;
/// else the sums are in memory.
template <class X, class Dy, int kWidth, int kPacks, bool kKept>
struct RmsNormBackward {
  static constexpr int kLargestBlock = 512;
  static constexpr bool kShortRows = kKept && kWidth * kPacks == 8;
  std::int64_t rows, blocks;
  int dim;
  const X* x;
  Type weight_type;
  const void* weight;
  const float* inverse_rms;
  const Dy* dy;
  const X* dh;  // or nullptr
  X* dx;
  Type copy_type;
  void* copy;  // or nullptr; X is float
  float* partial;

  struct Part {
    RowPart<X, kWidth, kPacks> x, dh;
    RowPart<Dy, kWidth, kPacks> dy;
    Floats<kWidth> weights[kPacks];
  };
  struct Sums {
    Floats<kWidth> packs[kPacks];
  };

  PHALANX_GPU_FUNCTION void read_weights(Part& part, int begin, int stride) const {
    PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
      const int i = begin + p * stride;
      if (i < dim) part.weights[p] = load_floats<kWidth>(weight_type, weight, i);
    }
  }

  PHALANX_GPU_FUNCTION void read(Part& part, std::int64_t row, int begin, int stride) const {
    part.x.read(x + row, begin, stride, dim);
    part.dy.read(dy + row, begin, stride, dim);
    if (dh != nullptr) part.dh.read(dh + row, begin, stride, dim);
    if constexpr (!kKept) read_weights(part, begin, stride);
  }

  PHALANX_GPU_FUNCTION float dot_of(const Part& part, int begin, int stride) const {
    float dot = 0.0f;
    PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
      if (begin + p * stride >= dim) continue;
      const Floats<kWidth> xs = part.x[p], dys = part.dy[p], weights = part.weights[p];
      PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) dot += dys[j] * weights[j] * xs[j];
    }
    return dot;
  }

  /// shrink: inverse^3 dot / dim, as d inverse / dx_i = -inverse^3 x_i / dim.
  PHALANX_GPU_FUNCTION void write(const Part& part, float inverse, float shrink, std::int64_t row, int begin,
                                  int stride, Sums& sums, float* out) const {
    PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
      const int i = begin + p * stride;
      if (i >= dim) continue;
      const Floats<kWidth> xs = part.x[p], dys = part.dy[p], weights = part.weights[p];
      Floats<kWidth> result, normalized;
      PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) normalized[j] = xs[j] * inverse;
      normalized = rounded_to<X>(normalized);
      PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) {
        result[j] = dys[j] * weights[j] * inverse - xs[j] * shrink;
        const float dweight = dys[j] * normalized[j];
        if constexpr (kKept) {
          sums.packs[p][j] += dweight;
        } else {
          out[i + j] += dweight;
        }
      }
      if (dh != nullptr) {
        const Floats<kWidth> more = part.dh[p];
        PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) result[j] += more[j];
      }
      store_floats<kWidth>(dx + row + i, result);
      if constexpr (sizeof(X) == sizeof(float)) {
        if (copy != nullptr) store_copy(row + i, result);
      }
    }
  }

  PHALANX_GPU_FUNCTION void store_copy(std::int64_t i, const Floats<kWidth>& values) const {
    if (copy_type == Type::bf16) {
      store_floats<kWidth>(static_cast<Bf16*>(copy) + i, values);
    } else if (copy_type == Type::f16) {
      store_floats<kWidth>(static_cast<F16*>(copy) + i, values);
    } else {
      store_floats<kWidth>(static_cast<float*>(copy) + i, values);
    }
  }

  template <class Block>
  PHALANX_GPU_FUNCTION void begin_sums(Block& block, int lane, int stride, Part& part, Sums& sums, float* out) const {
    if constexpr (kKept) {
      read_weights(part, lane * kWidth, stride);
      PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) sums.packs[p] = {};
    } else {
      // The columns that this lane adds to below.
      for (int begin = lane * kWidth; begin < dim; begin += block.lanes() * kWidth) {
        PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) out[begin + j] = 0.0f;
      }
    }
  }

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    typename Block::template PerLane<Part> parts(block);
    typename Block::template PerLane<Sums> sums(block);
    typename Block::template PerLane<float> dots(block);
    const int stride = block.lanes() * kWidth;
    float* const out = partial + block.index() * dim;
    block.each_lane([&](int lane) { begin_sums(block, lane, stride, parts[lane], sums[lane], out); });
    std::int64_t r = rows * block.index() / blocks;
    for (int left = static_cast<int>(rows * (block.index() + 1) / blocks - r); left > 0; --left, ++r) {
      const float inverse = inverse_rms[r];
      block.each_lane([&](int lane) {
        dots[lane] = 0.0f;
        for (int begin = lane * kWidth; begin < dim; begin += stride * kPacks) {
          read(parts[lane], r * dim, begin, stride);
          dots[lane] += dot_of(parts[lane], begin, stride);
          if constexpr (kKept) break;
        }
      });
      const float dot = block.reduce(dots, 0.0f, Add());
      const float shrink = dot * inverse * inverse * inverse / static_cast<float>(dim);
      block.each_lane([&](int lane) {
        for (int begin = lane * kWidth; begin < dim; begin += stride * kPacks) {
          if constexpr (!kKept) read(parts[lane], r * dim, begin, stride);
          write(parts[lane], inverse, shrink, r * dim, begin, stride, sums[lane], out);
          if constexpr (kKept) break;
        }
      });
    }
    if constexpr (kKept) {
      block.each_lane([&](int lane) {
        PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
          const int i = lane * kWidth + p * stride;
          if (i < dim) store_floats<kWidth>(out + i, sums[lane].packs[p]);
        }
      });
    }
  }
};

/// A block adds kColumns columns. Of the lanes of each, every one adds each kParts-th value.
template <class Out, int kColumns_>
struct ColumnSums {
  static constexpr int kLargestBlock = 1024, kColumns = kColumns_, kParts = kLargestBlock / kColumns;
  std::int64_t blocks, dim;
  const float* partial;
  Out* out;

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    typename Block::template Shared<float, kLargestBlock> sums(block);
    block.each_lane([&](int lane) {
      const std::int64_t column = block.index() * kColumns + lane % kColumns;
      float sum = 0.0f;
      if (column < dim) {
#if defined(__CUDACC__)
#pragma unroll 8
#endif
        for (std::int64_t b = lane / kColumns; b < blocks; b += kParts) sum += partial[b * dim + column];
      }
      sums[lane] = sum;
    });
    block.barrier();
    block.each_lane([&](int lane) {
      const std::int64_t column = block.index() * kColumns + lane;
      if (lane >= kColumns || column >= dim) return;
      float sum = sums[lane];
      PHALANX_UNROLL for (int part = 1; part < kParts; ++part) sum += sums[part * kColumns + lane];
      out[column] = from_float<Out>(sum);
    });
  }
};

}  // namespace phalanx::kernels::gpu
