// The fp32 inner loops of the fused CPU kernels, on raw pointers, compiled once per instruction set.
//
// Each function handles only the rows it is given: callers spread rows over threads. A row's result depends only on
// that row, so its bits do not depend on how the rows were spread. (Two instruction sets may differ in the last bit,
// because sums are taken in vector lanes.)
#pragma once

#include <cstdint>

namespace phalanx::kernels {

struct RowKernels {
  const char* isa;  // "baseline", "avx2" or "avx512"

  /// y = x * inverse_rms * weight with inverse_rms = 1 / sqrt(mean(x^2) + eps), saved for the backward pass.
  void (*rms_norm)(std::int64_t rows, std::int64_t dim, const float* x, const float* weight, float eps, float* y,
                   float* inverse_rms);
  /// dx from dy; adds to dweight the sum over these rows, in row order.
  void (*rms_norm_backward)(std::int64_t rows, std::int64_t dim, const float* x, const float* weight,
                            const float* inverse_rms, const float* dy, float* dx, float* dweight);

  /// y = silu(gate) * up, elementwise.
  void (*swiglu)(std::int64_t count, const float* gate, const float* up, float* y);
  /// dgate and dup from dy; y too, recomputed. Outputs may be the inputs.
  void (*swiglu_backward)(std::int64_t count, const float* gate, const float* up, const float* dy, float* dgate,
                          float* dup, float* y);

  /// Rotates `heads` vectors of 2 * half elements, `stride` apart, by one row of angles; sin_sign -1 rotates back.
  void (*rotate)(std::int64_t heads, std::int64_t half, const float* cos, const float* sin, float sin_sign,
                 const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride);

  /// Scores [rows, width] become probabilities in place. Row r may see columns up to first + r, with a window > 0 only
  /// the last `window` of those; it must see one. The others become 0. log_sum[r] = log(sum(exp(scores))).
  void (*causal_softmax)(std::int64_t rows, std::int64_t width, std::int64_t first, std::int64_t window, float* scores,
                         float* log_sum);
  /// p [rows, width]: scores become probabilities again, given log_sum. dp: gradients of the probabilities become
  /// `scale` times those of the scores; needs the attention's output and its gradient, `dim` wide.
  void (*causal_softmax_backward)(std::int64_t rows, std::int64_t width, std::int64_t first, std::int64_t window,
                                  std::int64_t dim, float scale, const float* log_sum, const float* out,
                                  std::int64_t out_stride, const float* dout, std::int64_t dout_stride, float* p,
                                  float* dp);

  /// Row by row, with z = log(sum(exp(logits))): loss[r] = z - logits[label] + z_weight * z^2; with `scale` != 0 the
  /// logits become scale * ((1 + 2 * z_weight * z) * softmax(logits) - one_hot(label)). A negative label gives zeros.
  /// Other labels must be in range.
  void (*cross_entropy)(std::int64_t rows, std::int64_t vocab, float* logits, const std::int64_t* labels, float scale,
                        float z_weight, float* loss);

  /// The same in two steps, for callers that have only some columns of the logits. `exponentials` turns each row of
  /// logits into exp(logits - largest) and returns the sum, too. `scale_rows` multiplies each row by its factor.
  void (*exponentials)(std::int64_t rows, std::int64_t width, float* logits, float* largest, float* sum);
  void (*scale_rows)(std::int64_t rows, std::int64_t width, const float* factor, float* x);

  /// y[r][o] = x[r] . w[o], for few rows: w is read once for every four of them. Rows of x, w and y are their strides
  /// apart. The bits of a product depend only on its two rows.
  void (*row_products)(std::int64_t rows, std::int64_t outs, std::int64_t in, const float* x, std::int64_t x_stride,
                       const float* w, std::int64_t w_stride, float* y, std::int64_t y_stride);

  /// y[r] = sum over j of p[r][j] v[j], in order: p [rows, count], v [count, dim], y [rows, dim], with strides as
  /// above.
  void (*weighted_sums)(std::int64_t rows, std::int64_t count, std::int64_t dim, const float* p, std::int64_t p_stride,
                        const float* v, std::int64_t v_stride, float* y, std::int64_t y_stride);
};

/// The fastest kernels that this processor supports.
const RowKernels& row_kernels();

/// All kernels that this processor supports, slowest first, for tests; nullptr from the first one that it does not.
struct AvailableRowKernels {
  const RowKernels* tables[3] = {nullptr, nullptr, nullptr};
};
AvailableRowKernels available_row_kernels();

}  // namespace phalanx::kernels
