// The loops of row_kernels.h. One source file per instruction set includes this file and first defines
// PHALANX_ROW_KERNELS (the table's name), PHALANX_ISA (its string) and PHALANX_LANES (floats in a register). Nothing
// from the standard library is used here: the linker might otherwise keep an inline function's AVX-512 copy for the
// whole program.
#include "phalanx/kernels/row_kernels.h"

namespace phalanx::kernels {
namespace {

/// e^x within 2 units in the last place; 0 below -87.3, large and finite above 88.3.
inline float exponential(float x) {
  x = x < -87.33f ? -87.33f : x;
  x = x > 88.37f ? 88.37f : x;
  // x = n ln 2 + r: adding 1.5 * 2^23 leaves the rounded n in the low bits.
  const float shifted = x * 1.44269504088896341f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const std::int32_t exponent = (__builtin_bit_cast(std::int32_t, shifted) - 0x4B400000 + 127) << 23;
  return p * __builtin_bit_cast(float, exponent);
}

void rms_norm(std::int64_t rows, std::int64_t dim, const float* x, const float* weight, float eps, float* y,
              float* inverse_rms) {
  for (std::int64_t r = 0; r < rows; ++r, x += dim, y += dim) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < dim; ++i) sum += x[i] * x[i];
    const float inverse = 1.0f / __builtin_sqrtf(sum / static_cast<float>(dim) + eps);
    inverse_rms[r] = inverse;
#pragma omp simd
    for (std::int64_t i = 0; i < dim; ++i) y[i] = x[i] * inverse * weight[i];
  }
}

void rms_norm_backward(std::int64_t rows, std::int64_t dim, const float* x, const float* weight,
                       const float* inverse_rms, const float* dy, float* dx, float* dweight) {
  for (std::int64_t r = 0; r < rows; ++r, x += dim, dy += dim, dx += dim) {
    const float inverse = inverse_rms[r];
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (std::int64_t i = 0; i < dim; ++i) dot += dy[i] * weight[i] * x[i];
    // d inverse / dx_i = -inverse^3 x_i / dim
    const float shrink = dot * inverse * inverse * inverse / static_cast<float>(dim);
#pragma omp simd
    for (std::int64_t i = 0; i < dim; ++i) {
      dweight[i] += dy[i] * x[i] * inverse;
      dx[i] = dy[i] * weight[i] * inverse - x[i] * shrink;
    }
  }
}

void swiglu(std::int64_t count, const float* gate, const float* up, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

void swiglu_backward(std::int64_t count, const float* gate, const float* up, const float* dy, float* dgate, float* dup,
                     float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = gate[i], u = up[i], d = dy[i];
    const float sigmoid = 1.0f / (1.0f + exponential(-g));
    const float silu = g * sigmoid;
    y[i] = silu * u;
    dup[i] = d * silu;
    dgate[i] = d * u * (sigmoid + silu * (1.0f - sigmoid));
  }
}

void rotate(std::int64_t heads, std::int64_t half, const float* cos, const float* sin, float sin_sign, const float* x,
            std::int64_t x_stride, float* y, std::int64_t y_stride) {
  for (std::int64_t h = 0; h < heads; ++h, x += x_stride, y += y_stride) {
#pragma omp simd
    for (std::int64_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half], c = cos[i], s = sin[i] * sin_sign;
      y[i] = a * c - b * s;
      y[i + half] = b * c + a * s;
    }
  }
}

inline float largest_of(std::int64_t count, const float* x) {
  float largest = x[0];
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

/// Replaces x by exp(x - shift) and returns the sum.
inline float exponentials_of(std::int64_t count, float shift, float* x) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) {
    const float e = exponential(x[i] - shift);
    x[i] = e;
    sum += e;
  }
  return sum;
}

inline void scale(std::int64_t count, float factor, float* x) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) x[i] *= factor;
}

/// Columns [begin, end) that a row of causal attention sees.
struct SeenColumns {
  SeenColumns(std::int64_t row, std::int64_t width, std::int64_t first, std::int64_t window)
      : begin(window > 0 && first + row + 1 > window ? first + row + 1 - window : 0),
        end(first + row + 1 < width ? first + row + 1 : width) {}
  std::int64_t begin, end;
};

void causal_softmax(std::int64_t rows, std::int64_t width, std::int64_t first, std::int64_t window, float* scores,
                    float* log_sum) {
  for (std::int64_t r = 0; r < rows; ++r, scores += width) {
    const SeenColumns seen(r, width, first, window);
    const std::int64_t count = seen.end - seen.begin;
    float* const x = scores + seen.begin;
    const float largest = largest_of(count, x), sum = exponentials_of(count, largest, x);
    scale(count, 1.0f / sum, x);
    for (std::int64_t i = 0; i < seen.begin; ++i) scores[i] = 0.0f;
    for (std::int64_t i = seen.end; i < width; ++i) scores[i] = 0.0f;
    log_sum[r] = largest + __builtin_logf(sum);
  }
}

void causal_softmax_backward(std::int64_t rows, std::int64_t width, std::int64_t first, std::int64_t window,
                             std::int64_t dim, float scale, const float* log_sum, const float* out,
                             std::int64_t out_stride, const float* dout, std::int64_t dout_stride, float* p,
                             float* dp) {
  for (std::int64_t r = 0; r < rows; ++r, p += width, dp += width, out += out_stride, dout += dout_stride) {
    const SeenColumns seen(r, width, first, window);
    float dot = 0.0f;  // sum of p dp, computed from the output: p v dout
#pragma omp simd reduction(+ : dot)
    for (std::int64_t i = 0; i < dim; ++i) dot += out[i] * dout[i];
    const float shift = log_sum[r];
#pragma omp simd
    for (std::int64_t i = seen.begin; i < seen.end; ++i) {
      const float probability = exponential(p[i] - shift);
      p[i] = probability;
      dp[i] = scale * probability * (dp[i] - dot);
    }
    for (std::int64_t i = 0; i < seen.begin; ++i) p[i] = dp[i] = 0.0f;
    for (std::int64_t i = seen.end; i < width; ++i) p[i] = dp[i] = 0.0f;
  }
}

void cross_entropy(std::int64_t rows, std::int64_t vocab, float* logits, const std::int64_t* labels,
                   float gradient_scale, float z_weight, float* loss) {
  for (std::int64_t r = 0; r < rows; ++r, logits += vocab) {
    if (labels[r] < 0) {  // not counted
      for (std::int64_t i = 0; i < vocab; ++i) logits[i] = 0.0f;
      loss[r] = 0.0f;
      continue;
    }
    const float largest = largest_of(vocab, logits);
    const float chosen = logits[labels[r]];
    float sum = 0.0f;
    if (gradient_scale == 0.0f) {
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = 0; i < vocab; ++i) sum += exponential(logits[i] - largest);
    } else {
      sum = exponentials_of(vocab, largest, logits);
    }
    const float z = __builtin_logf(sum) + largest;
    if (gradient_scale != 0.0f) {
      scale(vocab, (z_weight == 0.0f ? gradient_scale : gradient_scale * (1.0f + 2.0f * z_weight * z)) / sum, logits);
      logits[labels[r]] -= gradient_scale;
    }
    loss[r] = z_weight == 0.0f ? z - chosen : z - chosen + z_weight * z * z;
  }
}

void exponentials(std::int64_t rows, std::int64_t width, float* logits, float* largest, float* sum) {
  for (std::int64_t r = 0; r < rows; ++r, logits += width) {
    largest[r] = largest_of(width, logits);
    sum[r] = exponentials_of(width, largest[r], logits);
  }
}

void scale_rows(std::int64_t rows, std::int64_t width, const float* factor, float* x) {
  for (std::int64_t r = 0; r < rows; ++r, x += width) scale(width, factor[r], x);
}

// One register of floats. Packed: the same without alignment.
constexpr std::int64_t kLanes = PHALANX_LANES;
typedef float Lanes __attribute__((vector_size(4 * PHALANX_LANES)));
typedef float Packed __attribute__((vector_size(4 * PHALANX_LANES), aligned(4), may_alias));

inline Lanes load(const float* x) { return *reinterpret_cast<const Packed*>(x); }

/// A tile of products. Each is summed in its own lanes, so the number of rows computed at once changes no bits.
template <int kRows, int kOuts>
inline void product_tile(std::int64_t in, const float* x, std::int64_t x_stride, const float* w, std::int64_t w_stride,
                         float* y, std::int64_t y_stride) {
  Lanes sums[kRows][kOuts] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= in; i += kLanes) {
    Lanes weights[kOuts];
    for (int o = 0; o < kOuts; ++o) weights[o] = load(w + o * w_stride + i);
    for (int r = 0; r < kRows; ++r) {
      const Lanes values = load(x + r * x_stride + i);
      for (int o = 0; o < kOuts; ++o) sums[r][o] += values * weights[o];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int o = 0; o < kOuts; ++o) {
      float sum = 0.0f;
      for (int lane = 0; lane < kLanes; ++lane) sum += sums[r][o][lane];
      for (std::int64_t j = i; j < in; ++j) sum = __builtin_fmaf(x[r * x_stride + j], w[o * w_stride + j], sum);
      y[r * y_stride + o] = sum;
    }
  }
}

template <int kOuts>
inline void product_columns(std::int64_t rows, std::int64_t in, const float* x, std::int64_t x_stride, const float* w,
                            std::int64_t w_stride, float* y, std::int64_t y_stride) {
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    product_tile<4, kOuts>(in, x + r * x_stride, x_stride, w, w_stride, y + r * y_stride, y_stride);
  }
  for (; r < rows; ++r) {
    product_tile<1, kOuts>(in, x + r * x_stride, x_stride, w, w_stride, y + r * y_stride, y_stride);
  }
}

void row_products(std::int64_t rows, std::int64_t outs, std::int64_t in, const float* x, std::int64_t x_stride,
                  const float* w, std::int64_t w_stride, float* y, std::int64_t y_stride) {
  std::int64_t o = 0;
  if (rows == 1) {  // as many independent sums as the multiply-adds' latency needs
    for (; o + 8 <= outs; o += 8) product_tile<1, 8>(in, x, x_stride, w + o * w_stride, w_stride, y + o, y_stride);
  }
  for (; o + 3 <= outs; o += 3) product_columns<3>(rows, in, x, x_stride, w + o * w_stride, w_stride, y + o, y_stride);
  for (; o < outs; ++o) product_columns<1>(rows, in, x, x_stride, w + o * w_stride, w_stride, y + o, y_stride);
}

template <int kTiles>
inline void weighted_tile(std::int64_t count, const float* p, const float* v, std::int64_t v_stride, float* y) {
  Lanes sums[kTiles] = {};
  for (std::int64_t j = 0; j < count; ++j, v += v_stride) {
    for (int t = 0; t < kTiles; ++t) sums[t] += p[j] * load(v + t * kLanes);
  }
  for (int t = 0; t < kTiles; ++t) *reinterpret_cast<Packed*>(y + t * kLanes) = sums[t];
}

void weighted_sums(std::int64_t rows, std::int64_t count, std::int64_t dim, const float* p, std::int64_t p_stride,
                   const float* v, std::int64_t v_stride, float* y, std::int64_t y_stride) {
  for (std::int64_t r = 0; r < rows; ++r, p += p_stride, y += y_stride) {
    std::int64_t i = 0;
    for (; i + 4 * kLanes <= dim; i += 4 * kLanes) weighted_tile<4>(count, p, v + i, v_stride, y + i);
    for (; i + kLanes <= dim; i += kLanes) weighted_tile<1>(count, p, v + i, v_stride, y + i);
    for (; i < dim; ++i) {
      float sum = 0.0f;
      for (std::int64_t j = 0; j < count; ++j) sum = __builtin_fmaf(p[j], v[j * v_stride + i], sum);
      y[i] = sum;
    }
  }
}

}  // namespace

extern const RowKernels PHALANX_ROW_KERNELS;
const RowKernels PHALANX_ROW_KERNELS = {PHALANX_ISA,     rms_norm,     rms_norm_backward, swiglu,
                                        swiglu_backward, rotate,       causal_softmax,    causal_softmax_backward,
                                        cross_entropy,   exponentials, scale_rows,        row_products,
                                        weighted_sums};

}  // namespace phalanx::kernels
