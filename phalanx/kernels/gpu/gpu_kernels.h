// Fused kernels for a GPU's stream, as a table of functions on raw pointers. Torch-free.
//
// There are two tables of the same kernels, compiled from one source. cuda_kernels() starts them on a CUDA stream.
// host_kernels() runs them at once on the calling thread and on the host's memory: the lanes of a thread block take
// turns between barriers, and reductions add in the same tree, so that tests need no GPU.
//
// All functions are asynchronous on the stream, allocate nothing and wait for nothing. They return
// nullptr, or a message (a string that lives forever) if the arguments are not supported or the launch
// failed; then nothing was written.
//
// Values are stored as float, bfloat16 or float16 and computed in float; each result is rounded once, to nearest even,
// unless stated otherwise. Results have the same bits in every run on the same device and arguments. Pointers need the
// alignment of an element only, but kernels run several times as fast if pointers are multiples of 16 bytes, and
// dimensions and strides multiples of 8 elements. Dimensions of 0 are fine.
//
// REQUIRES: pointers are accessible to the device, and outputs overlap nothing else unless stated otherwise. Tensors
// are contiguous unless they have strides, which count elements. All rows of all arguments stay alive until the stream
// is past the call; tables of tensors are read before the call returns.
#pragma once

#include <cstdint>

namespace phalanx::kernels::gpu {

enum class Type : std::int32_t { f32, bf16, f16 };
enum class Float8Type : std::int32_t { e4m3, e5m2 };

/// A tensor to rotate: x [batch, seq, heads, head_dim], whose last dimension is contiguous, and the contiguous y.
struct RotateJob {
  const void* x;
  std::int64_t batch_stride, position_stride, head_stride;
  std::int64_t heads;
  void* y;
};

/// The angles of rotate(): float [seq, head_dim / 2], or [batch, seq, head_dim / 2] if each row has its own.
struct RotateAngles {
  const float* cos;
  const float* sin;
  bool per_row;
  float sin_sign;  // -1 rotates back
};

/// One parameter of adamw().
struct AdamWTensor {
  std::int64_t count;  // elements
  float* parameter;
  const void* grad;  // of AdamWSettings::grad_type
  float* exp_avg;
  float* exp_avg_sq;
  void* copy;         // the new parameter, rounded to AdamWSettings::copy_type; or nullptr
  const float* step;  // number of this step: 1, 2, ...
};

struct AdamWSettings {
  double lr, beta1, beta2, eps, weight_decay;
  Type grad_type;
  Type copy_type;
  const float* grad_scale;  // gradients are multiplied by it; or nullptr
  const float* skip;        // not 0: nothing is written; or nullptr
};

/// Values of squares().
struct ConstTensor {
  std::int64_t count;  // elements
  const void* values;
};

/// A result of float8_cast().
struct Float8Target {
  void* values;       // or nullptr: not wanted
  const float* amax;  // one of all values, or one a line: of a row of `plain`, or of a column of x in `transposed`
  float* inverse;     // as many: 1 / scale
};

struct Float8CastJob {
  std::int64_t rows, columns;
  Type type;
  const void* x;  // [rows, columns]
  bool via_bf16;  // f32 values are rounded to bf16 first
  Float8Type to;
  bool by_line;             // scales are those of lines, and powers of two
  Float8Target plain;       // [rows, columns]
  Float8Target transposed;  // [columns, rows rounded up to a multiple of 16 with zeros]
};

/// Numbers of a keyed stream, for uniform(): out[r * columns + c] is number first + r * row_stride + c.
struct UniformJob {
  std::uint64_t key;
  std::int64_t rows, columns, first, row_stride;
  float low, high;
  float* out;
};

struct GpuKernels {
  const char* name;  // "cuda" or "host"

  /// y = round(x * inverse_rms) * weight, where the inner rounding is to x's type and
  /// inverse_rms = 1 / sqrt(mean(x^2) + eps), which is saved. x, y: [rows, dim]; weight: [dim].
  /// y may be wider or narrower than x: f32 with any type, or x and y the same.
  const char* (*rms_norm)(void* stream, std::int64_t rows, std::int64_t dim, Type x_type, const void* x,
                          Type weight_type, const void* weight, float eps, Type y_type, void* y, float* inverse_rms);

  /// h = x + delta in x's type, and y and inverse_rms are rms_norm's of h. h may be x.
  const char* (*add_rms_norm)(void* stream, std::int64_t rows, std::int64_t dim, Type x_type, const void* x,
                              Type delta_type, const void* delta, void* h, Type weight_type, const void* weight,
                              float eps, Type y_type, void* y, float* inverse_rms);

  /// h = x + delta in x's type. delta's type: f32 or x's, or any where x's is f32. h may be x. No rounding but of h.
  const char* (*add)(void* stream, std::int64_t count, Type x_type, const void* x, Type delta_type, const void* delta,
                     void* h);

  /// dx, in x's type, is the gradient of rms_norm's x, plus dh (in x's type too) unless that is nullptr. dx may be dh.
  /// `copy`, unless it is nullptr, is dx rounded to copy_type; then x's type must be f32.
  /// Block b of `blocks` writes to partial [blocks, dim] the weight's gradient of rows [b * rows / blocks,
  /// (b + 1) * rows / blocks), in float; column_sums adds them. dy's type: as rms_norm's y.
  /// REQUIRES: 1 <= blocks; rms_norm_backward_blocks(rows, dim) is a good number.
  const char* (*rms_norm_backward)(void* stream, std::int64_t rows, std::int64_t dim, Type x_type, const void* x,
                                   Type weight_type, const void* weight, const float* inverse_rms, Type dy_type,
                                   const void* dy, const void* dh, void* dx, Type copy_type, void* copy, float* partial,
                                   std::int64_t blocks);

  /// out [dim] = sum of partial [blocks, dim] over the blocks, in a fixed order.
  const char* (*column_sums)(void* stream, std::int64_t blocks, std::int64_t dim, const float* partial, Type out_type,
                             void* out);

  /// Rotates pairs of elements, half a head_dim apart, by the angles: y[i] = x[i] cos - x[i + half] sin and
  /// y[i + half] = x[i + half] cos + x[i] sin.
  /// One or two tensors (queries and keys) of the same batch, seq and head_dim.
  /// REQUIRES: batch * seq < 2^31.
  const char* (*rotate)(void* stream, std::int64_t batch, std::int64_t seq, std::int64_t head_dim, Type type,
                        const RotateAngles& angles, const RotateJob* jobs, int count);

  /// y = silu(gate) * up. gate, up: [rows, hidden], rows their strides apart; y is contiguous, and may be gate or up
  /// where that is contiguous.
  const char* (*swiglu)(void* stream, std::int64_t rows, std::int64_t hidden, Type type, const void* gate,
                        std::int64_t gate_stride, const void* up, std::int64_t up_stride, void* y);

  /// dgate and dup from the contiguous dy; y too, recomputed, unless it is nullptr. dgate, dup and y may be gate, up or
  /// dy if strides agree.
  const char* (*swiglu_backward)(void* stream, std::int64_t rows, std::int64_t hidden, Type type, const void* gate,
                                 std::int64_t gate_stride, const void* up, std::int64_t up_stride, const void* dy,
                                 void* dgate, std::int64_t dgate_stride, void* dup, std::int64_t dup_stride, void* y);

  /// Row by row of logits [rows, vocab], with z = log(sum(exp(logits))): loss[r] = z - logits[label] + z_weight * z^2;
  /// with `scale` != 0 the logits become scale * ((1 + 2 * z_weight * z) * softmax(logits) - one_hot(label)), in their
  /// type.
  /// A row whose label is kIgnoredLabel has loss 0 and gradient 0.
  /// A row whose label is otherwise outside [0, vocab) has loss and gradient NaN.
  /// REQUIRES: vocab < 2^31.
  const char* (*cross_entropy)(void* stream, std::int64_t rows, std::int64_t vocab, std::int64_t row_stride, Type type,
                               void* logits, const std::int64_t* labels, float scale, float z_weight, float* loss);

  /// One step of AdamW for all tensors, with optim/step_kernels.h's formula, operation by operation. The corrections
  /// 1 - beta^step are computed in double on the device.
  const char* (*adamw)(void* stream, int count, const AdamWTensor* tensors, const AdamWSettings& settings);

  /// Adds 1 to each of the counters, unless *skip is not 0; skip may be nullptr.
  const char* (*increment)(void* stream, int count, float* const* steps, const float* skip);

  /// Adds the squares of all values in double: partial[b] for block b of squares_blocks(count, tensors).
  const char* (*squares)(void* stream, int count, const ConstTensor* tensors, Type type, double* partial);

  /// *total = sum of partial [count], in a fixed order.
  const char* (*total)(void* stream, std::int64_t count, const double* partial, double* total);

  /// The largest absolute values of x [rows, columns]: of all, of each row, of each column; nullptr: not
  /// wanted. Each is the larger of that and of what is there, where a NaN is larger than any number.
  /// via_bf16: of f32 values rounded to bf16.
  /// REQUIRES: columns is a multiple of 8, and x of 16 bytes.
  const char* (*float8_amax)(void* stream, std::int64_t rows, std::int64_t columns, Type type, const void* x,
                             bool via_bf16, float* of_all, float* of_rows, float* of_columns);

  /// Values times scale = largest number of the type / max(amax, 1e-12), saturated; what is NaN then stays so.
  /// REQUIRES: columns is a multiple of 16, and x and the values of 16 bytes.
  const char* (*float8_cast)(void* stream, const Float8CastJob& job);

  /// Random numbers in [low, high), the bits of fill_uniform() in tensor/counter_fill.h.
  const char* (*uniform)(void* stream, const UniformJob& job);
};

constexpr std::int64_t kIgnoredLabel = -100;

/// Rows of logits [rows, vocab] that a loss makes at a time: as many as fill a GPU's products, and at most 2 GiB of
/// them in 16 bits. It depends on no device, so that sums over parts have fixed bits.
constexpr std::int64_t rows_of_logits(std::int64_t rows, std::int64_t vocab) {
  constexpr std::int64_t kElements = std::int64_t{1} << 30, kMultiple = 256;
  const std::int64_t most = kElements / vocab / kMultiple * kMultiple;
  return rows < kMultiple || rows < most ? rows : most < kMultiple ? kMultiple : most;
}

/// A number of blocks that fills a GPU and leaves column_sums little to do. It depends on no device, so that the
/// gradients' bits do not.
std::int64_t rms_norm_backward_blocks(std::int64_t rows, std::int64_t dim);

std::int64_t squares_blocks(int count, const ConstTensor* tensors);

/// nullptr in a build without nvcc, and if a GPU that this process sees is older than compute capability 8.0 (A100).
const GpuKernels* cuda_kernels();

/// The major number of the compute capability of a CUDA device that this process sees; 0: there is none.
int cuda_capability(int device);

/// The same kernels on the host's memory. `stream` is ignored.
const GpuKernels& host_kernels();

}  // namespace phalanx::kernels::gpu
