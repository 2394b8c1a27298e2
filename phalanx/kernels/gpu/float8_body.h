// Largest absolute values, and casts to float8, of matrices with contiguous rows.
#pragma once

#if defined(__CUDACC__)
#include <cuda_fp8.h>
#endif

#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/gpu/storage.h"

namespace phalanx::kernels::gpu {

// The bits of kTiny lie as far apart as the smallest numbers of the format.
struct E4m3 {
  static constexpr float kLargest = 448.0f, kNormal = 0x1p-6f, kTiny = 0x1p14f;
  static constexpr std::uint32_t kLargestBits = 0x7e, kDropped = 20, kBias = 127 - 7;
};
struct E5m2 {
  static constexpr float kLargest = 57344.0f, kNormal = 0x1p-14f, kTiny = 0x1p7f;
  static constexpr std::uint32_t kLargestBits = 0x7b, kDropped = 21, kBias = 127 - 15;
};

#if !defined(__CUDACC__)
/// The nearest number of the format; of two, the even one. Saturated; a NaN stays one.
template <class To>
inline std::uint32_t float8_bits(float value) {
  const std::uint32_t bits = as_bits(value), sign = bits >> 31 << 7, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (as_float(magnitude) >= To::kLargest) return sign | To::kLargestBits;
  if (as_float(magnitude) < To::kNormal) return sign | (as_bits(as_float(magnitude) + To::kTiny) - as_bits(To::kTiny));
  const std::uint32_t half = (1u << (To::kDropped - 1)) - 1, odd = magnitude >> To::kDropped & 1u;
  return sign | (magnitude - (To::kBias << 23) + half + odd) >> To::kDropped;
}
#endif

/// Two numbers in the low half of a word, the first one lowest.
template <class To>
PHALANX_GPU_FUNCTION std::uint32_t two_float8(float first, float second) {
#if defined(__CUDACC__)
  constexpr auto kFormat = std::is_same_v<To, E4m3> ? __NV_E4M3 : __NV_E5M2;
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, kFormat);
#else
  return float8_bits<To>(first) | float8_bits<To>(second) << 8;
#endif
}

/// The larger of two numbers that are not negative, as bits: a NaN is larger than all numbers.
struct MaxOfBits {
  PHALANX_GPU_FUNCTION float operator()(float a, float b) const { return as_bits(a) > as_bits(b) ? a : b; }
};
PHALANX_GPU_FUNCTION float absolute(float value) { return as_float(as_bits(value) & 0x7fffffffu); }

/// Whatever the order of the calls, the result is the same.
PHALANX_GPU_FUNCTION void take_max(float* to, float value) {
#if defined(__CUDACC__)
  atomicMax(reinterpret_cast<unsigned*>(to), as_bits(value));
#else
  *to = MaxOfBits()(*to, value);
#endif
}

/// Rounding keeps the order, so the largest value is rounded only once.
PHALANX_GPU_FUNCTION float through_bf16(float value) { return to_float(from_float<Bf16>(value)); }

template <class T, int kWidth>
struct Float8AmaxOfAll {
  static constexpr int kLargestBlock = 256, kPacks = 4;
  std::int64_t count, blocks;
  const T* x;
  bool via_bf16;
  float* amax;

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    typename Block::template PerLane<float> largest(block);
    const std::int64_t stride = std::int64_t{block.lanes()} * kWidth;
    block.each_lane([&](int lane) {
      largest[lane] = 0.0f;
      for (std::int64_t begin = block.index() * stride * kPacks + lane * kWidth; begin < count;
           begin += blocks * stride * kPacks) {
        Pack<T, kWidth> packs[kPacks];
        PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
          if (begin + p * stride < count) packs[p] = load<T, kWidth>(x + begin + p * stride);
        }
        PHALANX_UNROLL for (int p = 0; p < kPacks; ++p) {
          if (begin + p * stride >= count) continue;
          const Floats<kWidth> values = floats<T, kWidth>(packs[p]);
          PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) {
            largest[lane] = MaxOfBits()(largest[lane], absolute(values[j]));
          }
        }
      }
    });
    const float all = block.reduce(largest, 0.0f, MaxOfBits());
    block.each_lane([&](int lane) {
      if (lane == 0) take_max(amax, via_bf16 ? through_bf16(all) : all);
    });
  }
};

/// Of each row and of each column. A block has a tile of kRows x kColumns; a lane kEach rows of eight columns.
template <class T>
struct Float8AmaxOfLines {
  static constexpr int kLargestBlock = 256, kWidth = 8, kEach = 4, kGroups = 16;
  static constexpr int kRows = kGroups * kEach, kColumns = kGroups * kWidth, kStride = kGroups + 1;
  std::int64_t rows, columns;
  int tiles;  // of a row
  const T* x;
  bool via_bf16;
  float* of_rows;     // or nullptr
  float* of_columns;  // or nullptr

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    typename Block::template Shared<float, kRows * kStride> by_row(block);
    typename Block::template Shared<float, kColumns * kStride> by_column(block);
    const std::int64_t first_row = block.index() / tiles * kRows, first_column = block.index() % tiles * kColumns;
    block.each_lane([&](int lane) {
      const int across = lane % kGroups, down = lane / kGroups;
      const std::int64_t column = first_column + across * kWidth;
      Floats<kWidth> own_columns{};
      Pack<T, kWidth> packs[kEach];
      PHALANX_UNROLL for (int r = 0; r < kEach; ++r) {
        const std::int64_t row = first_row + down * kEach + r;
        if (row < rows && column < columns) packs[r] = load<T, kWidth>(x + row * columns + column);
      }
      PHALANX_UNROLL for (int r = 0; r < kEach; ++r) {
        float own_row = 0.0f;
        if (first_row + down * kEach + r < rows && column < columns) {
          const Floats<kWidth> values = floats<T, kWidth>(packs[r]);
          PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) {
            own_row = MaxOfBits()(own_row, absolute(values[j]));
            own_columns[j] = MaxOfBits()(own_columns[j], absolute(values[j]));
          }
        }
        by_row[(down * kEach + r) * kStride + across] = own_row;
      }
      PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) by_column[(across * kWidth + j) * kStride + down] =
          own_columns[j];
    });
    block.barrier();
    block.each_lane([&](int lane) {
      if (lane < kRows) {
        if (of_rows != nullptr && first_row + lane < rows) take_line(by_row, lane, of_rows + first_row + lane);
      } else if (lane < kRows + kColumns) {
        const int column = lane - kRows;
        if (of_columns != nullptr && first_column + column < columns) {
          take_line(by_column, column, of_columns + first_column + column);
        }
      }
    });
  }

  template <class Shared>
  PHALANX_GPU_FUNCTION void take_line(Shared& lines, int line, float* to) const {
    float largest = 0.0f;
    PHALANX_UNROLL for (int i = 0; i < kGroups; ++i) largest = MaxOfBits()(largest, lines[line * kStride + i]);
    take_max(to, via_bf16 ? through_bf16(largest) : largest);
  }
};

/// A block has a tile of kRows x kColumns, and a lane sixteen consecutive values of a row. They are turned in shared
/// memory, and a lane writes sixteen consecutive values of a column.
template <class T, class To, bool kByLine>
struct Float8CastTile {
  static constexpr int kLargestBlock = 256, kWidth = 16, kRows = 64, kColumns = 128;
  static constexpr int kAcross = kColumns / kWidth, kDown = kLargestBlock / kAcross;
  static constexpr int kStride = kRows / 4 + 1;  // words of a column in shared memory
  std::int64_t rows, columns, padded_rows;
  int tiles;  // of a row
  const T* x;
  bool via_bf16;
  Float8Target plain, transposed;

  struct Bytes {
    std::uint32_t words[4];
  };

  /// Of a value. Powers of two where each line has its own.
  PHALANX_GPU_FUNCTION static float scale_of(float amax) {
    const float scale = static_cast<float>(static_cast<double>(To::kLargest) / (amax < 1e-12 ? 1e-12 : amax));
    if constexpr (!kByLine) return scale;
    return as_float(as_bits(scale) & 0x7f800000u) + (scale - scale);  // 0, or NaN
  }

  PHALANX_GPU_FUNCTION static Bytes bytes_of(const Floats<kWidth>& values) {
    Bytes bytes;
    PHALANX_UNROLL for (int w = 0; w < 4; ++w) {
      bytes.words[w] =
          two_float8<To>(values[4 * w], values[4 * w + 1]) | two_float8<To>(values[4 * w + 2], values[4 * w + 3]) << 16;
    }
    return bytes;
  }

  PHALANX_GPU_FUNCTION static void store_bytes(void* values, std::int64_t at, const Bytes& bytes) {
    Pack<float, 4> pack;
    PHALANX_UNROLL for (int w = 0; w < 4; ++w) pack.words[w] = bytes.words[w];
    store<float, 4>(reinterpret_cast<float*>(static_cast<unsigned char*>(values) + at), pack);
  }

  /// The scales of this tile's rows and columns, and their inverses in memory.
  template <class Block, class RowScales, class ColumnScales>
  PHALANX_GPU_FUNCTION void find_scales(Block& block, std::int64_t first_row, std::int64_t first_column,
                                        RowScales& row_scales, ColumnScales& column_scales) const {
    block.each_lane([&](int lane) {
      if (lane < kRows) {
        const std::int64_t row = first_row + lane, at = kByLine ? row : 0;
        if (plain.values == nullptr || row >= rows) return;
        row_scales[lane] = scale_of(plain.amax[at]);
        if (first_column == 0 && (kByLine || row == 0)) plain.inverse[at] = 1.0f / row_scales[lane];
      } else if (lane < kRows + kColumns) {
        const std::int64_t column = first_column + lane - kRows, at = kByLine ? column : 0;
        if (transposed.values == nullptr || column >= columns) return;
        column_scales[lane - kRows] = scale_of(transposed.amax[at]);
        if (first_row == 0 && (kByLine || column == 0)) transposed.inverse[at] = 1.0f / column_scales[lane - kRows];
      }
    });
    block.barrier();
  }

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    typename Block::template Shared<float, kRows> row_scales(block);
    typename Block::template Shared<float, kColumns> column_scales(block);
    typename Block::template Shared<std::uint32_t, kColumns * kStride> turned(block);
    const std::int64_t first_row = block.index() / tiles * kRows, first_column = block.index() % tiles * kColumns;
    find_scales(block, first_row, first_column, row_scales, column_scales);
    block.each_lane([&](int lane) {
      const int across = lane % kAcross * kWidth;
      const std::int64_t column = first_column + across;
      PHALANX_UNROLL for (int pass = 0; pass < kRows / kDown; ++pass) {
        const int r = pass * kDown + lane / kAcross;
        const std::int64_t row = first_row + r;
        if (column >= columns) continue;
        Bytes bytes{};
        if (row < rows) {
          const T* const from = x + row * columns + column;
          Floats<kWidth> values;
          PHALANX_UNROLL for (int half = 0; half < 2; ++half) {
            const Floats<8> some = load_floats<8>(from + half * 8);
            PHALANX_UNROLL for (int j = 0; j < 8; ++j) values[half * 8 + j] = some[j];
          }
          if constexpr (std::is_same_v<T, float>) {
            if (via_bf16) values = rounded_to<Bf16>(values);
          }
          if (plain.values != nullptr) {
            Floats<kWidth> scaled;
            PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) scaled[j] = values[j] * row_scales[r];
            bytes = bytes_of(scaled);
            store_bytes(plain.values, row * columns + column, bytes);
          }
          if (transposed.values != nullptr && (kByLine || plain.values == nullptr)) {
            Floats<kWidth> scaled;
            PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) scaled[j] = values[j] * column_scales[across + j];
            bytes = bytes_of(scaled);
          }
        }
        if (transposed.values == nullptr) continue;
        unsigned char* const shared = reinterpret_cast<unsigned char*>(&turned[0]);
        PHALANX_UNROLL for (int j = 0; j < kWidth; ++j) {
          shared[(across + j) * kStride * 4 + r] = static_cast<unsigned char>(bytes.words[j / 4] >> (j % 4 * 8));
        }
      }
    });
    if (transposed.values == nullptr) return;
    block.barrier();
    block.each_lane([&](int lane) {
      PHALANX_UNROLL for (int part = lane; part < kColumns * kRows / kWidth; part += kLargestBlock) {
        const int column = part / (kRows / kWidth), down = part % (kRows / kWidth) * kWidth;
        if (first_column + column >= columns || first_row + down >= padded_rows) continue;
        Bytes bytes;
        PHALANX_UNROLL for (int w = 0; w < 4; ++w) bytes.words[w] = turned[column * kStride + down / 4 + w];
        store_bytes(transposed.values, (first_column + column) * padded_rows + first_row + down, bytes);
      }
    });
  }
};

}  // namespace phalanx::kernels::gpu
