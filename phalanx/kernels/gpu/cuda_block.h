// A thread block of CUDA; see host_block.h for what its members mean. Only for nvcc.
#pragma once

#include <cstdint>

namespace phalanx::kernels::gpu {

/// kGroups: for rows that are short, several of our blocks make one of CUDA's: threadIdx.x is the lane of up to a
/// warp's, threadIdx.y the block in CUDA's block. There is no shared memory for them.
template <bool kGroups>
class CudaBlock {
 public:
  template <class T>
  class PerLane {
   public:
    __device__ __forceinline__ explicit PerLane(const CudaBlock&) {}
    __device__ __forceinline__ T& operator[](int) { return value_; }

   private:
    T value_;
  };
  template <class T, int N>
  class Shared {
   public:
    __device__ __forceinline__ explicit Shared(const CudaBlock&) {
      __shared__ T values[N];
      values_ = values;
    }
    __device__ __forceinline__ T& operator[](int i) { return values_[i]; }

   private:
    T* values_;
  };

  __device__ __forceinline__ std::int64_t index() const {
    if constexpr (kGroups) return std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    return blockIdx.x;
  }
  __device__ __forceinline__ int index_y() const { return static_cast<int>(blockIdx.y); }
  __device__ __forceinline__ int lanes() const { return static_cast<int>(blockDim.x); }

  template <class F>
  __device__ __forceinline__ void each_lane(F f) const {
    f(static_cast<int>(threadIdx.x));
  }
  __device__ __forceinline__ void barrier() const { __syncthreads(); }

  /// One barrier: the next reduction writes to the other half of the shared memory, and a lane that is at the one after
  /// that has passed a barrier behind all reads of this one.
  template <class T, class Combine>
  __device__ __forceinline__ T reduce(PerLane<T>& values, T identity, Combine combine) {
    const int lane = static_cast<int>(threadIdx.x);
    if constexpr (kGroups) return of_group(values[lane], combine);
    const T own = of_warp(values[lane], combine);
    if (lanes() <= kWarp) {
      __syncwarp();
      return own;
    }
    __shared__ T warps[2][kWarp];
    T* const turn = warps[turn_];
    turn_ ^= 1;
    if (lane % kWarp == 0) turn[lane / kWarp] = own;
    __syncthreads();
    return of_warp(lane % kWarp < lanes() / kWarp ? turn[lane % kWarp] : identity, combine);
  }

 private:
  static constexpr int kWarp = 32;
  static constexpr unsigned kAll = 0xffffffffu;

  template <class T, class Combine>
  static __device__ __forceinline__ T of_warp(T value, Combine combine) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) value = combine(value, shuffled(value, distance));
    return value;
  }
  /// The groups of a warp go their own ways: each waits only for its own lanes.
  template <class T, class Combine>
  __device__ __forceinline__ T of_group(T value, Combine combine) const {
    const unsigned first = threadIdx.y * blockDim.x % kWarp;
    const unsigned group = blockDim.x == kWarp ? kAll : ((1u << blockDim.x) - 1) << first;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      if (distance < lanes()) value = combine(value, shuffled(value, distance, group));
    }
    __syncwarp(group);
    return value;
  }
  static __device__ __forceinline__ float shuffled(float value, int distance, unsigned group = kAll) {
    return __shfl_xor_sync(group, value, distance);
  }
  static __device__ __forceinline__ double shuffled(double value, int distance, unsigned group = kAll) {
    return __shfl_xor_sync(group, value, distance);
  }
  template <class T>
  static __device__ __forceinline__ T shuffled(const T& value, int distance, unsigned group = kAll) {
    return value.shuffled([=](float x) { return shuffled(x, distance, group); });
  }

  int turn_ = 0;
};

}  // namespace phalanx::kernels::gpu
