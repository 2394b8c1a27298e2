// Uniform random numbers of a keyed stream (base/philox.h), with the bits of tensor/counter_fill.h.
#pragma once

#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/gpu/storage.h"

namespace phalanx::kernels::gpu {

/// Each lane makes the four numbers of one counter of Philox4x32-10, and writes those that are in its row.
struct FillUniform {
  static constexpr int kLargestBlock = 256, kWords = 4, kRounds = 10;
  UniformJob job;
  std::int64_t counters;  // of a row

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    block.each_lane([&](int lane) {
      const std::int64_t index = block.index() * block.lanes() + lane;
      const std::int64_t row = index / counters;
      if (row >= job.rows) return;
      const std::int64_t begin = job.first + row * job.row_stride;  // element of the stream
      const std::int64_t counter = begin / kWords + index % counters;
      std::uint32_t words[kWords];
      philox(static_cast<std::uint64_t>(counter), words);
      PHALANX_UNROLL for (int w = 0; w < kWords; ++w) {
        const std::int64_t column = counter * kWords + w - begin;
        if (column < 0 || column >= job.columns) continue;
        const float unit = static_cast<float>(static_cast<std::int32_t>(words[w] >> 8)) * 0x1p-24f;
        job.out[row * job.columns + column] = job.low + (job.high - job.low) * unit;
      }
    });
  }

 private:
  PHALANX_GPU_FUNCTION void philox(std::uint64_t counter, std::uint32_t (&words)[kWords]) const {
    words[0] = static_cast<std::uint32_t>(counter);
    words[1] = static_cast<std::uint32_t>(counter >> 32);
    words[2] = words[3] = 0;
    std::uint32_t key0 = static_cast<std::uint32_t>(job.key), key1 = static_cast<std::uint32_t>(job.key >> 32);
    PHALANX_UNROLL for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * words[0];
      const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * words[2];
      words[0] = static_cast<std::uint32_t>(product1 >> 32) ^ words[1] ^ key0;
      words[1] = static_cast<std::uint32_t>(product1);
      words[2] = static_cast<std::uint32_t>(product0 >> 32) ^ words[3] ^ key1;
      words[3] = static_cast<std::uint32_t>(product0);
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
  }
};

}  // namespace phalanx::kernels::gpu
