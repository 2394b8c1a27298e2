// Kernels over lists of tensors: AdamW, its step counters, and sums of squares.
#pragma once

#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/gpu/rms_norm_body.h"
#include "phalanx/kernels/gpu/storage.h"

namespace phalanx::kernels::gpu {

/// Tensors and the blocks that they are divided into. Small enough to be a kernel's argument.
template <class Tensor, int kChunk_, int kCapacity_>
struct TensorList {
  static constexpr int kChunk = kChunk_, kCapacity = kCapacity_;  // elements a block; tensors
  int count;
  int first_block[kCapacity];
  Tensor tensors[kCapacity];

  static std::int64_t blocks_of(std::int64_t elements) { return (elements + kChunk - 1) / kChunk; }

  PHALANX_GPU_FUNCTION int tensor_of(int block) const {
    int found = 0;
    for (int t = 1; t < count && first_block[t] <= block; ++t) found = t;
    return found;
  }
};

/// Calls f(std::integral_constant<int, N>, element) for a lane's elements of [begin, end), N at a time.
template <int kWidth, class F>
PHALANX_GPU_FUNCTION void each_element(std::int64_t begin, std::int64_t end, bool vectors, int lane, int lanes, F f) {
  const std::int64_t packed = vectors ? end - (end - begin) % kWidth : begin;
  for (std::int64_t i = begin + lane * kWidth; i < packed; i += lanes * kWidth) {
    f(std::integral_constant<int, kWidth>(), i);
  }
  for (std::int64_t i = packed + lane; i < end; i += lanes) f(std::integral_constant<int, 1>(), i);
}

PHALANX_GPU_FUNCTION bool aligned_address(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

template <class Grad>
struct AdamW {
  static constexpr int kLargestBlock = 256, kWidth = 4;
  using List = TensorList<AdamWTensor, 16384, 48>;
  List list;
  float decay, grad_weight, beta2, square_weight, eps;  // as AdamWStep of optim/step_kernels.h
  double lr, beta1, beta2_exact;
  Type copy_type;
  const float* grad_scale;
  const float* skip;

  /// base^exponent by squaring: the same bits everywhere.
  PHALANX_GPU_FUNCTION static double power(double base, float exponent) {
    double result = 1.0;
    for (std::int64_t n = static_cast<std::int64_t>(exponent); n > 0; n /= 2, base *= base) {
      if (n % 2 != 0) result *= base;
    }
    return result;
  }

  struct Corrections {
    float size, inverse_correction;
  };
  PHALANX_GPU_FUNCTION Corrections corrections_of(float step) const {
    return {static_cast<float>(lr / (1.0 - power(beta1, step))),
            static_cast<float>(1.0 / square_root(1.0 - power(beta2_exact, step)))};
  }

  template <int N>
  PHALANX_GPU_FUNCTION void update(const AdamWTensor& tensor, std::int64_t i, const Corrections& corrections,
                                   float factor) const {
    const Floats<N> grads = load_floats<N>(static_cast<const Grad*>(tensor.grad) + i);
    Floats<N> parameters = load_floats<N>(tensor.parameter + i), averages = load_floats<N>(tensor.exp_avg + i),
              squares = load_floats<N>(tensor.exp_avg_sq + i);
    PHALANX_UNROLL for (int j = 0; j < N; ++j) {
      const float g = grads[j] * factor;
      const float p = parameters[j] - decay * parameters[j];
      const float m = averages[j] + grad_weight * (g - averages[j]);
      const float v = beta2 * squares[j] + square_weight * g * g;
      averages[j] = m;
      squares[j] = v;
      parameters[j] = p - corrections.size * m / (square_root(v) * corrections.inverse_correction + eps);
    }
    store_floats<N>(tensor.parameter + i, parameters);
    store_floats<N>(tensor.exp_avg + i, averages);
    store_floats<N>(tensor.exp_avg_sq + i, squares);
    if (tensor.copy == nullptr) return;
    if (copy_type == Type::f32) store_floats<N>(static_cast<float*>(tensor.copy) + i, parameters);
    if (copy_type == Type::bf16) store_floats<N>(static_cast<Bf16*>(tensor.copy) + i, parameters);
    if (copy_type == Type::f16) store_floats<N>(static_cast<F16*>(tensor.copy) + i, parameters);
  }

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    if (skip != nullptr && *skip != 0.0f) return;
    const int t = list.tensor_of(static_cast<int>(block.index()));
    const AdamWTensor& tensor = list.tensors[t];
    typename Block::template Shared<Corrections, 1> corrections(block);
    block.each_lane([&](int lane) {
      if (lane == 0) corrections[0] = corrections_of(*tensor.step);
    });
    block.barrier();
    const std::int64_t begin = (block.index() - list.first_block[t]) * List::kChunk;
    const std::int64_t end = tensor.count < begin + List::kChunk ? tensor.count : begin + List::kChunk;
    const bool vectors = aligned_address(tensor.parameter) && aligned_address(tensor.grad) &&
                         aligned_address(tensor.exp_avg) && aligned_address(tensor.exp_avg_sq) &&
                         aligned_address(tensor.copy);
    const float factor = grad_scale == nullptr ? 1.0f : *grad_scale;
    block.each_lane([&](int lane) {
      const Corrections by = corrections[0];
      each_element<kWidth>(begin, end, vectors, lane, block.lanes(),
                           [&](auto n, std::int64_t i) { update<decltype(n)::value>(tensor, i, by, factor); });
    });
  }
};

struct Increment {
  static constexpr int kLargestBlock = 256, kCapacity = 256;
  int count;
  float* steps[kCapacity];
  const float* skip;

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    if (skip != nullptr && *skip != 0.0f) return;
    block.each_lane([&](int lane) {
      if (lane < count) *steps[lane] += 1.0f;
    });
  }
};

template <class T>
struct Squares {
  static constexpr int kLargestBlock = 256, kWidth = 16 / static_cast<int>(sizeof(T)), kBatch = 4;
  using List = TensorList<ConstTensor, 65536, 128>;
  List list;
  double* partial;

  template <int N>
  PHALANX_GPU_FUNCTION static double squares_of(const Floats<N>& values) {
    double sum = 0.0;
    PHALANX_UNROLL for (int j = 0; j < N; ++j) {
      const double value = static_cast<double>(values[j]);
      sum += value * value;
    }
    return sum;
  }

  PHALANX_GPU_FUNCTION static double sum_of(const T* values, std::int64_t begin, std::int64_t end, bool vectors,
                                            int lane, int lanes) {
    double sum = 0.0;
    if (vectors && end - begin == List::kChunk) {  // all but the last block of a tensor: several loads at a time
      const int step = lanes * kWidth;
      for (int i = lane * kWidth; i < List::kChunk; i += kBatch * step) {
        Pack<T, kWidth> packs[kBatch];
        PHALANX_UNROLL for (int k = 0; k < kBatch; ++k) packs[k] = load<T, kWidth>(values + begin + i + k * step);
        PHALANX_UNROLL for (int k = 0; k < kBatch; ++k) sum += squares_of(floats<T, kWidth>(packs[k]));
      }
      return sum;
    }
    each_element<kWidth>(begin, end, vectors, lane, lanes, [&](auto n, std::int64_t i) {
      sum += squares_of(load_floats<decltype(n)::value>(values + i));
    });
    return sum;
  }

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    static_assert(List::kChunk % (kLargestBlock * kWidth * kBatch) == 0);
    const int t = list.tensor_of(static_cast<int>(block.index()));
    const T* const values = static_cast<const T*>(list.tensors[t].values);
    const std::int64_t begin = (block.index() - list.first_block[t]) * List::kChunk;
    const std::int64_t count = list.tensors[t].count, end = count < begin + List::kChunk ? count : begin + List::kChunk;
    typename Block::template PerLane<double> sums(block);
    block.each_lane(
        [&](int lane) { sums[lane] = sum_of(values, begin, end, aligned_address(values), lane, block.lanes()); });
    const double sum = block.reduce(sums, 0.0, Add());
    block.each_lane([&](int lane) {
      if (lane == 0) partial[block.index()] = sum;
    });
  }
};

struct Total {
  static constexpr int kLargestBlock = 1024;
  std::int64_t count;
  const double* partial;
  double* total;

  template <class Block>
  PHALANX_GPU_FUNCTION void operator()(Block& block) const {
    typename Block::template PerLane<double> sums(block);
    block.each_lane([&](int lane) {
      sums[lane] = 0.0;
      for (std::int64_t i = lane; i < count; i += block.lanes()) sums[lane] += partial[i];
    });
    const double sum = block.reduce(sums, 0.0, Add());
    block.each_lane([&](int lane) {
      if (lane == 0) *total = sum;
    });
  }
};

}  // namespace phalanx::kernels::gpu
