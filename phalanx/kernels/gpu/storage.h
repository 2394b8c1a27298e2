// How values are stored, and computed with: float, bfloat16 and float16 in memory, float in registers. For nvcc and for
// host compilers, with the same bits.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define PHALANX_GPU_FUNCTION __device__ __forceinline__
#define PHALANX_UNROLL _Pragma("unroll")
#else
#include <cmath>
#define PHALANX_GPU_FUNCTION inline
#define PHALANX_UNROLL
#endif

namespace phalanx::kernels::gpu {

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

/// N floats in registers.
template <int N>
struct Floats {
  float values[N];
  PHALANX_GPU_FUNCTION float& operator[](int i) { return values[i]; }
  PHALANX_GPU_FUNCTION float operator[](int i) const { return values[i]; }
};

// ------------------------------------------------------------------------------------------------------ conversions

PHALANX_GPU_FUNCTION float as_float(std::uint32_t bits) {
#if defined(__CUDACC__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}
PHALANX_GPU_FUNCTION std::uint32_t as_bits(float value) {
#if defined(__CUDACC__)
  return __float_as_uint(value);
#else
  return std::bit_cast<std::uint32_t>(value);
#endif
}

PHALANX_GPU_FUNCTION float to_float(float value) { return value; }
PHALANX_GPU_FUNCTION float to_float(Bf16 value) { return as_float(std::uint32_t{value.bits} << 16); }
PHALANX_GPU_FUNCTION float to_float(F16 value) {
#if defined(__CUDACC__)
  return __half2float(__ushort_as_half(value.bits));
#else
  const std::uint32_t sign = std::uint32_t{value.bits} >> 15 << 31, magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return as_float(sign | 0x7f800000u | magnitude << 13);  // infinite, or no number
  // The exponent's bias is 112 less; the product also makes numbers of those below the normal ones.
  return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
#endif
}

/// The nearest value of type T; of two, the even one.
template <class T>
PHALANX_GPU_FUNCTION T from_float(float value);

template <>
PHALANX_GPU_FUNCTION float from_float<float>(float value) {
  return value;
}

template <>
PHALANX_GPU_FUNCTION Bf16 from_float<Bf16>(float value) {
#if defined(__CUDACC__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
  const std::uint32_t bits = as_bits(value);
  if (value != value) return {0x7fff};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
#endif
}

template <>
PHALANX_GPU_FUNCTION F16 from_float<F16>(float value) {
#if defined(__CUDACC__)
  return {__half_as_ushort(__float2half_rn(value))};
#else
  if (value != value) return {0x7fff};
  const std::uint32_t bits = as_bits(value), sign = bits >> 31 << 15, magnitude = bits & 0x7fffffffu;
  std::uint32_t rounded;
  if (magnitude < 0x38800000u) {  // below 2^-14, spaced evenly: a sum with 0.5 rounds to multiples of 2^-24
    rounded = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
  } else {
    rounded = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    rounded = rounded < 0x7c00u ? rounded : 0x7c00u;
  }
  return {static_cast<std::uint16_t>(sign | rounded)};
#endif
}

// -------------------------------------------------------------------------------------- several values in one access

/// N consecutive values as in memory, read and written in accesses of up to 16 bytes.
template <class T, int N>
struct Pack {
  static constexpr int kWords = static_cast<int>(sizeof(T)) * N / 4;
  static_assert(kWords * 4 == static_cast<int>(sizeof(T)) * N);
  std::uint32_t words[kWords];
};
template <class T>
struct Pack<T, 1> {
  T value;
};

template <class T, int N>
PHALANX_GPU_FUNCTION Pack<T, N> load(const T* from) {
  Pack<T, N> pack;
  if constexpr (N == 1) {
    pack.value = *from;
  } else {
#if defined(__CUDACC__)
    if constexpr (Pack<T, N>::kWords % 4 == 0) {
      PHALANX_UNROLL for (int i = 0; i < Pack<T, N>::kWords; i += 4) {
        const uint4 words = *reinterpret_cast<const uint4*>(reinterpret_cast<const std::uint32_t*>(from) + i);
        pack.words[i] = words.x, pack.words[i + 1] = words.y, pack.words[i + 2] = words.z, pack.words[i + 3] = words.w;
      }
    } else {
      static_assert(Pack<T, N>::kWords == 2);
      const uint2 words = *reinterpret_cast<const uint2*>(from);
      pack.words[0] = words.x, pack.words[1] = words.y;
    }
#else
    std::memcpy(pack.words, from, sizeof(pack.words));
#endif
  }
  return pack;
}

/// Streamed values are the first that a cache gives up.
enum class Caching { plain, streamed };

#if defined(__CUDACC__)
// In assembly, as nvcc may take an assignment of a uint4 apart.
template <Caching kCaching>
PHALANX_GPU_FUNCTION void store_words(std::size_t to, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                      std::uint32_t d) {
  if constexpr (kCaching == Caching::streamed) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  } else {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  }
}
PHALANX_GPU_FUNCTION void store_words(std::size_t to, std::uint32_t a, std::uint32_t b) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(a), "r"(b) : "memory");
}
#endif

template <class T, int N, Caching kCaching = Caching::plain>
PHALANX_GPU_FUNCTION void store(T* to, const Pack<T, N>& pack) {
  if constexpr (N == 1) {
    *to = pack.value;
  } else {
#if defined(__CUDACC__)
    const std::size_t address = __cvta_generic_to_global(to);
    const std::uint32_t* const words = pack.words;
    if constexpr (Pack<T, N>::kWords % 4 == 0) {
      PHALANX_UNROLL for (int i = 0; i < Pack<T, N>::kWords; i += 4) {
        store_words<kCaching>(address + i * 4, words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
    } else {
      static_assert(Pack<T, N>::kWords == 2);
      store_words(address, words[0], words[1]);
    }
#else
    std::memcpy(to, pack.words, sizeof(pack.words));
#endif
  }
}

// Two 16-bit values in a word, the first in the low half.
PHALANX_GPU_FUNCTION void split(std::uint32_t word, Bf16, float& low, float& high) {
  low = as_float(word << 16);
  high = as_float(word & 0xffff0000u);
}
PHALANX_GPU_FUNCTION void split(std::uint32_t word, F16, float& low, float& high) {
  low = to_float(F16{static_cast<std::uint16_t>(word & 0xffffu)});
  high = to_float(F16{static_cast<std::uint16_t>(word >> 16)});
}
template <class T>
PHALANX_GPU_FUNCTION std::uint32_t joined(float low, float high) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, Bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return std::uint32_t{__bfloat16_as_ushort(pair.x)} | std::uint32_t{__bfloat16_as_ushort(pair.y)} << 16;
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return std::uint32_t{__half_as_ushort(pair.x)} | std::uint32_t{__half_as_ushort(pair.y)} << 16;
  }
#else
  return std::uint32_t{from_float<T>(low).bits} | std::uint32_t{from_float<T>(high).bits} << 16;
#endif
}

template <class T, int N>
PHALANX_GPU_FUNCTION Floats<N> floats(const Pack<T, N>& pack) {
  Floats<N> result;
  if constexpr (N == 1) {
    result[0] = to_float(pack.value);
  } else if constexpr (std::is_same_v<T, float>) {
    PHALANX_UNROLL for (int i = 0; i < N; ++i) result[i] = as_float(pack.words[i]);
  } else {
    PHALANX_UNROLL for (int i = 0; i < N; i += 2) split(pack.words[i / 2], T{}, result.values[i], result.values[i + 1]);
  }
  return result;
}

template <class T, int N>
PHALANX_GPU_FUNCTION Pack<T, N> pack_of(const Floats<N>& values) {
  Pack<T, N> pack;
  if constexpr (N == 1) {
    pack.value = from_float<T>(values[0]);
  } else if constexpr (std::is_same_v<T, float>) {
    PHALANX_UNROLL for (int i = 0; i < N; ++i) pack.words[i] = as_bits(values[i]);
  } else {
    PHALANX_UNROLL for (int i = 0; i < N; i += 2) pack.words[i / 2] = joined<T>(values[i], values[i + 1]);
  }
  return pack;
}

/// In pairs, unlike from_float(): a GPU converts two values four times as fast as one.
template <class T, int N>
PHALANX_GPU_FUNCTION Floats<N> rounded_to(const Floats<N>& values) {
  return floats<T, N>(pack_of<T, N>(values));
}

template <int N, class T>
PHALANX_GPU_FUNCTION Floats<N> load_floats(const T* from) {
  return floats<T, N>(load<T, N>(from));
}
template <int N, class T>
PHALANX_GPU_FUNCTION void store_floats(T* to, const Floats<N>& values) {
  store<T, N>(to, pack_of<T, N>(values));
}

// ------------------------------------------------------------------------------------------------------- arithmetic

PHALANX_GPU_FUNCTION float exponential(float x) {
#if defined(__CUDACC__)
  return expf(x);
#else
  return std::exp(x);
#endif
}
PHALANX_GPU_FUNCTION float logarithm(float x) {
#if defined(__CUDACC__)
  return logf(x);
#else
  return std::log(x);
#endif
}
PHALANX_GPU_FUNCTION float square_root(float x) {
#if defined(__CUDACC__)
  return __fsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}
PHALANX_GPU_FUNCTION double square_root(double x) {
#if defined(__CUDACC__)
  return __dsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

/// a / b for results of type T: correctly rounded for float.
/// For 16-bit types within 2 units in float's last place, and 0 where b is above 2^126.
template <class T>
PHALANX_GPU_FUNCTION float quotient(float a, float b) {
#if defined(__CUDACC__)
  if constexpr (!std::is_same_v<T, float>) return __fdividef(a, b);
#endif
  return a / b;
}

}  // namespace phalanx::kernels::gpu
