// The table of gpu_kernels.h for one way to launch: checks of arguments, choice of the kernel's types and widths, and
// the sizes of grids. A Launcher has
//
//   static const char* run(void* stream, std::int64_t blocks, int blocks_y, int lanes, const Body& body)
#pragma once

#include <cstdint>
#include <initializer_list>

#include "phalanx/kernels/gpu/add_body.h"
#include "phalanx/kernels/gpu/cross_entropy_body.h"
#include "phalanx/kernels/gpu/float8_body.h"
#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/gpu/rms_norm_body.h"
#include "phalanx/kernels/gpu/rotate_body.h"
#include "phalanx/kernels/gpu/storage.h"
#include "phalanx/kernels/gpu/swiglu_body.h"
#include "phalanx/kernels/gpu/tensor_list_body.h"
#include "phalanx/kernels/gpu/uniform_body.h"

namespace phalanx::kernels::gpu {

/// f(T()) for the C++ type of `type`, or `otherwise` if there is none.
template <class F>
const char* with_type(Type type, const char* otherwise, F f) {
  switch (type) {
    case Type::f32:
      return f(float());
    case Type::bf16:
      return f(Bf16());
    case Type::f16:
      return f(F16());
  }
  return otherwise;
}

/// f(X(), Y()) for the types that a norm may read and write.
template <class F>
const char* with_norm_types(Type x_type, Type y_type, const char* otherwise, F f) {
  return with_type(x_type, otherwise, [&](auto x) {
    if (y_type == x_type) return f(x, x);
    if (y_type == Type::f32) return f(x, float());
    if constexpr (sizeof(x) == sizeof(float)) {
      if (y_type == Type::bf16) return f(x, Bf16());
      if (y_type == Type::f16) return f(x, F16());
    }
    return otherwise;
  });
}

inline bool is_type(Type type) { return type == Type::f32 || type == Type::bf16 || type == Type::f16; }

inline bool aligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

inline std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// A power of two, from `least` to `most`.
inline int lanes_for(std::int64_t wanted, int most, int least = 32) {
  int lanes = least;
  while (lanes < wanted && lanes < most) lanes *= 2;
  return lanes;
}

constexpr int kLeastLanes = 8;  // of a short row
constexpr std::int64_t kLargestDim = std::int64_t{1} << 30;

template <int kWidth_, int kPacks_, bool kKept_>
struct RowShape {
  static constexpr int kWidth = kWidth_, kPacks = kPacks_;
  static constexpr bool kKept = kKept_;
};

template <class Launcher>
struct Kernels {
  template <class Body>
  static const char* launch(void* stream, std::int64_t blocks, int blocks_y, int lanes, const Body& body) {
    static_assert(sizeof(Body) <= 4096, "larger arguments need CUDA 12.1 and compute capability 7.0");
    if (blocks > 0x7fffffff) return "more than 2^31 - 1 thread blocks: pass fewer rows at a time";
    return Launcher::run(stream, blocks, blocks_y, lanes, body);
  }

  // ---------------------------------------------------------------------------------------------------------- norms

  static const char* norm(void* stream, std::int64_t rows, std::int64_t dim, Type x_type, const void* x,
                          Type delta_type, const void* delta, void* h, Type weight_type, const void* weight, float eps,
                          Type y_type, void* y, float* inverse_rms) {
    if (rows < 0 || dim < 0 || dim > kLargestDim) return "rms_norm: rows or dim is negative, or dim above 2^30";
    if (!is_type(weight_type) || !is_type(delta_type)) return "rms_norm: unknown type of the weight or of delta";
    if (rows == 0 || dim == 0) return nullptr;
    return with_norm_types(x_type, y_type, "rms_norm: y's type must be f32 or x's, or x f32", [&](auto x1, auto y1) {
      using X = decltype(x1);
      using Y = decltype(y1);
      constexpr int kVector = 16 / static_cast<int>(sizeof(X)), kPacks = 4;
      const auto run = [&](auto shape, int lanes) {
        using S = decltype(shape);
        return launch(stream, rows, 1, lanes,
                      RmsNorm<X, Y, S::kWidth, S::kPacks, S::kKept>{
                          static_cast<int>(dim), eps, static_cast<const X*>(x), delta_type, delta, static_cast<X*>(h),
                          weight_type, weight, static_cast<Y*>(y), inverse_rms});
      };
      if (dim % kVector != 0 || !aligned({x, delta, h, weight, y})) {
        return run(RowShape<1, kPacks, false>(), lanes_for(divide_up(dim, kPacks), 512));
      }
      const std::int64_t packs = dim / kVector;
      if (packs > 512 * kPacks) return run(RowShape<kVector, kPacks, false>(), 512);
      if (packs <= 32) return run(RowShape<kVector, 1, true>(), lanes_for(packs, 32, kLeastLanes));
      return run(RowShape<kVector, kPacks, true>(), lanes_for(divide_up(packs, kPacks), 512));
    });
  }

  static const char* rms_norm(void* stream, std::int64_t rows, std::int64_t dim, Type x_type, const void* x,
                              Type weight_type, const void* weight, float eps, Type y_type, void* y,
                              float* inverse_rms) {
    return norm(stream, rows, dim, x_type, x, Type::f32, nullptr, nullptr, weight_type, weight, eps, y_type, y,
                inverse_rms);
  }

  static const char* add_rms_norm(void* stream, std::int64_t rows, std::int64_t dim, Type x_type, const void* x,
                                  Type delta_type, const void* delta, void* h, Type weight_type, const void* weight,
                                  float eps, Type y_type, void* y, float* inverse_rms) {
    if (delta == nullptr && rows > 0 && dim > 0) return "add_rms_norm: delta is null";
    return norm(stream, rows, dim, x_type, x, delta_type, delta, h, weight_type, weight, eps, y_type, y, inverse_rms);
  }

  static const char* add(void* stream, std::int64_t count, Type x_type, const void* x, Type delta_type,
                         const void* delta, void* h) {
    if (count < 0) return "add: count is negative";
    if (count == 0) return nullptr;
    return with_norm_types(x_type, delta_type, "add: delta's type must be f32 or x's, or x f32", [&](auto x1, auto d1) {
      using X = decltype(x1);
      using Delta = decltype(d1);
      const auto run = [&](auto width) {
        using Body = AddDelta<X, Delta, decltype(width)::value>;
        constexpr std::int64_t kInBlock = std::int64_t{Body::kLargestBlock} * Body::kPacks * decltype(width)::value;
        return launch(stream, divide_up(count, kInBlock), 1, Body::kLargestBlock,
                      Body{count, static_cast<const X*>(x), static_cast<const Delta*>(delta), static_cast<X*>(h)});
      };
      constexpr int kVector = 16 / static_cast<int>(sizeof(Delta) < sizeof(X) ? sizeof(Delta) : sizeof(X));
      if (count % kVector != 0 || !aligned({x, delta, h})) return run(std::integral_constant<int, 1>());
      return run(std::integral_constant<int, kVector>());
    });
  }

  static const char* rms_norm_backward(void* stream, std::int64_t rows, std::int64_t dim, Type x_type, const void* x,
                                       Type weight_type, const void* weight, const float* inverse_rms, Type dy_type,
                                       const void* dy, const void* dh, void* dx, Type copy_type, void* copy,
                                       float* partial, std::int64_t blocks) {
    if (rows < 0 || dim < 0 || dim > kLargestDim)
      return "rms_norm_backward: rows or dim is negative, or dim above 2^30";
    if (!is_type(weight_type)) return "rms_norm_backward: unknown type of the weight";
    if (blocks < 1) return "rms_norm_backward: blocks is below 1";
    if (copy != nullptr && (x_type != Type::f32 || !is_type(copy_type))) {
      return "rms_norm_backward: a copy needs a known type, and an x of f32";
    }
    if (dim == 0) return nullptr;
    const char* const types = "rms_norm_backward: dy's type must be f32 or x's, or x f32";
    return with_norm_types(x_type, dy_type, types, [&](auto x1, auto dy1) {
      using X = decltype(x1);
      using Dy = decltype(dy1);
      constexpr int kVector = 16 / static_cast<int>(sizeof(X));
      const auto run = [&](auto shape, int lanes) {
        using S = decltype(shape);
        return launch(
            stream, blocks, 1, lanes,
            RmsNormBackward<X, Dy, S::kWidth, S::kPacks, S::kKept>{
                rows, blocks, static_cast<int>(dim), static_cast<const X*>(x), weight_type, weight, inverse_rms,
                static_cast<const Dy*>(dy), static_cast<const X*>(dh), static_cast<X*>(dx), copy_type, copy, partial});
      };
      if (dim % kVector != 0 || !aligned({x, weight, dy, dh, dx, copy, partial})) {
        return run(RowShape<1, 4, false>(), lanes_for(divide_up(dim, 4), 512));
      }
      if (dim <= 512 * 8)
        return run(RowShape<kVector, 8 / kVector, true>(), lanes_for(divide_up(dim, 8), 512, kLeastLanes));
      if (dim <= 512 * 16) return run(RowShape<kVector, 16 / kVector, true>(), 512);
      return run(RowShape<kVector, 8 / kVector, false>(), 512);
    });
  }

  static const char* column_sums(void* stream, std::int64_t blocks, std::int64_t dim, const float* partial,
                                 Type out_type, void* out) {
    if (blocks < 0 || dim < 0) return "column_sums: blocks or dim is negative";
    if (dim == 0) return nullptr;
    return with_type(out_type, "column_sums: unknown type", [&](auto out1) {
      using Out = decltype(out1);
      const auto run = [&](auto columns) {
        using Body = ColumnSums<Out, decltype(columns)::value>;
        return launch(stream, divide_up(dim, Body::kColumns), 1, Body::kLargestBlock,
                      Body{blocks, dim, partial, static_cast<Out*>(out)});
      };
      return blocks > 2048 ? run(std::integral_constant<int, 8>()) : run(std::integral_constant<int, 32>());
    });
  }

  // --------------------------------------------------------------------------------------------------------- rotary

  static const char* rotate(void* stream, std::int64_t batch, std::int64_t seq, std::int64_t head_dim, Type type,
                            const RotateAngles& angles, const RotateJob* jobs, int count) {
    if (batch < 0 || seq < 0 || head_dim < 0 || head_dim % 2 != 0) {
      return "rotate: batch, seq or head_dim is negative, or head_dim odd";
    }
    if (seq != 0 && batch > 0x7fffffff / seq) return "rotate: batch * seq is 2^31 or more";
    if (count < 1 || count > 2) return "rotate: expected 1 or 2 jobs";
    std::int64_t most_heads = 0;
    for (int j = 0; j < count; ++j) {
      if (jobs[j].heads < 0 || jobs[j].heads * head_dim > kLargestDim / 8) {
        return "rotate: heads is negative, or heads * head_dim above 2^27";
      }
      most_heads = most_heads < jobs[j].heads ? jobs[j].heads : most_heads;
    }
    if (batch * seq * head_dim * most_heads == 0) return nullptr;
    return with_type(type, "rotate: unknown type", [&](auto t1) {
      using T = decltype(t1);
      constexpr int kVector = 16 / static_cast<int>(sizeof(T));
      const auto run = [&](auto width) {
        using Body = Rotate<T, decltype(width)::value>;
        return launch(stream, divide_up(batch * seq, Body::kPositions), count, Body::kLargestBlock,
                      Body{{jobs[0], jobs[count - 1]},
                           angles,
                           static_cast<int>(batch * seq),
                           static_cast<int>(seq),
                           static_cast<int>(head_dim / 2)});
      };
      bool vectors = head_dim / 2 % kVector == 0 && aligned({angles.cos, angles.sin});
      for (int j = 0; j < count; ++j) {
        const std::int64_t strides = jobs[j].batch_stride | jobs[j].position_stride | jobs[j].head_stride;
        vectors = vectors && strides % kVector == 0 && aligned({jobs[j].x, jobs[j].y});
      }
      return vectors ? run(std::integral_constant<int, kVector>()) : run(std::integral_constant<int, 1>());
    });
  }

  // --------------------------------------------------------------------------------------------------------- swiglu

  /// Launches make(width, place) for rows of this width: all as one row, where they lie one behind the other.
  template <template <class, int> class Body, class T, class Make>
  static const char* in_rows(void* stream, std::int64_t rows, std::int64_t hidden, bool vectors, Make make) {
    const auto run = [&](auto width) {
      constexpr int kWidth = decltype(width)::value, kPacks = Body<T, kWidth>::kPacks;
      const int lanes = lanes_for(divide_up(hidden, kWidth * kPacks), Body<T, kWidth>::kLargestBlock);
      const std::int64_t blocks = divide_up(hidden, std::int64_t{kWidth} * kPacks * lanes);
      return launch(stream, rows * blocks, 1, lanes,
                    make(width, RowOfBlocks<kWidth, kPacks>{hidden, static_cast<int>(blocks)}));
    };
    constexpr int kVector = 16 / static_cast<int>(sizeof(T));
    return vectors ? run(std::integral_constant<int, kVector>()) : run(std::integral_constant<int, 1>());
  }

  static const char* swiglu(void* stream, std::int64_t rows, std::int64_t hidden, Type type, const void* gate,
                            std::int64_t gate_stride, const void* up, std::int64_t up_stride, void* y) {
    if (rows < 0 || hidden < 0) return "swiglu: rows or hidden is negative";
    if (rows == 0 || hidden == 0) return nullptr;
    if (gate_stride == hidden && up_stride == hidden) {
      hidden *= rows;
      rows = 1;
    }
    const std::int64_t strides = rows == 1 ? hidden : hidden | gate_stride | up_stride;
    return with_type(type, "swiglu: unknown type", [&](auto t1) {
      using T = decltype(t1);
      const bool vectors = (strides * static_cast<std::int64_t>(sizeof(T))) % 16 == 0 && aligned({gate, up, y});
      return in_rows<Swiglu, T>(stream, rows, hidden, vectors, [&](auto width, auto place) {
        return Swiglu<T, decltype(width)::value>{
            place, static_cast<const T*>(gate), static_cast<const T*>(up), static_cast<T*>(y), gate_stride, up_stride};
      });
    });
  }

  static const char* swiglu_backward(void* stream, std::int64_t rows, std::int64_t hidden, Type type, const void* gate,
                                     std::int64_t gate_stride, const void* up, std::int64_t up_stride, const void* dy,
                                     void* dgate, std::int64_t dgate_stride, void* dup, std::int64_t dup_stride,
                                     void* y) {
    if (rows < 0 || hidden < 0) return "swiglu_backward: rows or hidden is negative";
    if (rows == 0 || hidden == 0) return nullptr;
    if (gate_stride == hidden && up_stride == hidden && dgate_stride == hidden && dup_stride == hidden) {
      hidden *= rows;
      rows = 1;
    }
    const std::int64_t strides = rows == 1 ? hidden : hidden | gate_stride | up_stride | dgate_stride | dup_stride;
    return with_type(type, "swiglu_backward: unknown type", [&](auto t1) {
      using T = decltype(t1);
      const bool vectors =
          (strides * static_cast<std::int64_t>(sizeof(T))) % 16 == 0 && aligned({gate, up, dy, dgate, dup, y});
      return in_rows<SwigluBackward, T>(stream, rows, hidden, vectors, [&](auto width, auto place) {
        return SwigluBackward<T, decltype(width)::value>{place,
                                                         static_cast<const T*>(gate),
                                                         static_cast<const T*>(up),
                                                         static_cast<const T*>(dy),
                                                         static_cast<T*>(dgate),
                                                         static_cast<T*>(dup),
                                                         static_cast<T*>(y),
                                                         gate_stride,
                                                         up_stride,
                                                         dgate_stride,
                                                         dup_stride};
      });
    });
  }

  // --------------------------------------------------------------------------------------------------- cross entropy

  static const char* cross_entropy(void* stream, std::int64_t rows, std::int64_t vocab, std::int64_t row_stride,
                                   Type type, void* logits, const std::int64_t* labels, float scale, float z_weight,
                                   float* loss) {
    if (rows < 0 || vocab < 1 || vocab > kLargestDim)
      return "cross_entropy: rows is negative, or vocab not in [1, 2^30]";
    if (row_stride < vocab) return "cross_entropy: rows overlap: row_stride is below vocab";
    if (rows == 0) return nullptr;
    return with_type(type, "cross_entropy: unknown type", [&](auto t1) {
      using Body = CrossEntropy<decltype(t1)>;
      return launch(
          stream, rows, 1, lanes_for(divide_up(vocab, Body::kWidth * Body::kBatch), Body::kLargestBlock),
          Body{static_cast<int>(vocab), row_stride, static_cast<decltype(t1)*>(logits), labels, scale, z_weight, loss});
    });
  }

  // ------------------------------------------------------------------------------------------------ lists of tensors

  /// Launches `body` for as many tensors at a time as its list takes. done(blocks) follows each launch.
  template <class Body, class Tensor, class Done>
  static const char* over_tensors(void* stream, int count, const Tensor* tensors, Body& body, Done done) {
    using List = typename Body::List;
    int next = 0;
    while (next < count) {
      std::int64_t blocks = 0;
      body.list.count = 0;
      for (; next < count && body.list.count < List::kCapacity; ++next) {
        if (tensors[next].count < 0) return "a tensor's count is negative";
        const std::int64_t more = List::blocks_of(tensors[next].count);
        if (more == 0) continue;
        if (blocks + more > 0x7fffffff) {
          if (blocks == 0) return "a tensor is too large";
          break;
        }
        body.list.first_block[body.list.count] = static_cast<int>(blocks);
        body.list.tensors[body.list.count++] = tensors[next];
        blocks += more;
      }
      if (blocks == 0) continue;
      if (const char* error = launch(stream, blocks, 1, Body::kLargestBlock, body)) return error;
      done(blocks);
    }
    return nullptr;
  }

  static const char* adamw(void* stream, int count, const AdamWTensor* tensors, const AdamWSettings& s) {
    if (!is_type(s.copy_type)) return "adamw: unknown type of the copies";
    return with_type(s.grad_type, "adamw: unknown type of the gradients", [&](auto grad1) {
      AdamW<decltype(grad1)> body{{},
                                  static_cast<float>(s.lr * s.weight_decay),
                                  static_cast<float>(1 - s.beta1),
                                  static_cast<float>(s.beta2),
                                  static_cast<float>(1 - s.beta2),
                                  static_cast<float>(s.eps),
                                  s.lr,
                                  s.beta1,
                                  s.beta2,
                                  s.copy_type,
                                  s.grad_scale,
                                  s.skip};
      return over_tensors(stream, count, tensors, body, [](std::int64_t) {});
    });
  }

  static const char* increment(void* stream, int count, float* const* steps, const float* skip) {
    for (int from = 0; from < count; from += Increment::kCapacity) {
      Increment body{count - from < Increment::kCapacity ? count - from : Increment::kCapacity, {}, skip};
      for (int i = 0; i < body.count; ++i) body.steps[i] = steps[from + i];
      if (const char* error = launch(stream, 1, 1, Increment::kLargestBlock, body)) return error;
    }
    return nullptr;
  }

  static const char* squares(void* stream, int count, const ConstTensor* tensors, Type type, double* partial) {
    return with_type(type, "squares: unknown type", [&](auto t1) {
      Squares<decltype(t1)> body{{}, partial};
      return over_tensors(stream, count, tensors, body, [&](std::int64_t blocks) { body.partial += blocks; });
    });
  }

  static const char* total(void* stream, std::int64_t count, const double* partial, double* total) {
    if (count < 0) return "total: count is negative";
    return launch(stream, 1, 1, lanes_for(count, Total::kLargestBlock), Total{count, partial, total});
  }

  // ---------------------------------------------------------------------------------------------------------- float8

  static const char* float8_amax(void* stream, std::int64_t rows, std::int64_t columns, Type type, const void* x,
                                 bool via_bf16, float* of_all, float* of_rows, float* of_columns) {
    if (rows < 0 || columns < 0 || columns > kLargestDim || columns % 8 != 0) {
      return "float8_amax: rows or columns is negative, or columns above 2^30 or no multiple of 8";
    }
    if (!aligned({x})) return "float8_amax: x is no multiple of 16 bytes";
    if (rows == 0 || columns == 0) return nullptr;
    return with_type(type, "float8_amax: unknown type", [&](auto t1) {
      using T = decltype(t1);
      if (of_all != nullptr) {
        using Body = Float8AmaxOfAll<T, 16 / static_cast<int>(sizeof(T))>;
        constexpr std::int64_t kMost = 132 * 8;  // blocks that fill an H100
        const std::int64_t count = rows * columns, wanted = divide_up(count, Body::kLargestBlock * 64);
        const std::int64_t blocks = wanted < kMost ? wanted : kMost;
        const char* const error = launch(stream, blocks, 1, Body::kLargestBlock,
                                         Body{count, blocks, static_cast<const T*>(x), via_bf16, of_all});
        if (error != nullptr) return error;
      }
      if (of_rows == nullptr && of_columns == nullptr) return static_cast<const char*>(nullptr);
      using Body = Float8AmaxOfLines<T>;
      const std::int64_t tiles = divide_up(columns, Body::kColumns);
      return launch(
          stream, tiles * divide_up(rows, Body::kRows), 1, Body::kLargestBlock,
          Body{rows, columns, static_cast<int>(tiles), static_cast<const T*>(x), via_bf16, of_rows, of_columns});
    });
  }

  static const char* float8_cast(void* stream, const Float8CastJob& job) {
    if (job.rows < 0 || job.columns < 0 || job.columns > kLargestDim || job.columns % 16 != 0) {
      return "float8_cast: rows or columns is negative, or columns above 2^30 or no multiple of 16";
    }
    if (!aligned({job.x, job.plain.values, job.transposed.values})) {
      return "float8_cast: x or values are no multiple of 16 bytes";
    }
    if (job.to != Float8Type::e4m3 && job.to != Float8Type::e5m2) return "float8_cast: unknown type of the values";
    if (job.rows == 0 || job.columns == 0) return nullptr;
    return with_type(job.type, "float8_cast: unknown type", [&](auto t1) {
      const auto run = [&](auto to1, auto by_line) {
        using T = decltype(t1);
        using Body = Float8CastTile<T, decltype(to1), decltype(by_line)::value>;
        const std::int64_t tiles = divide_up(job.columns, Body::kColumns), padded = divide_up(job.rows, 16) * 16;
        return launch(stream, tiles * divide_up(job.rows, Body::kRows), 1, Body::kLargestBlock,
                      Body{job.rows, job.columns, padded, static_cast<int>(tiles), static_cast<const T*>(job.x),
                           job.via_bf16, job.plain, job.transposed});
      };
      const auto with_lines = [&](auto to1) {
        return job.by_line ? run(to1, std::true_type()) : run(to1, std::false_type());
      };
      return job.to == Float8Type::e4m3 ? with_lines(E4m3()) : with_lines(E5m2());
    });
  }

  static const char* uniform(void* stream, const UniformJob& job) {
    if (job.rows < 0 || job.columns < 0 || job.first < 0 || job.row_stride < 0) {
      return "uniform: rows, columns, first or row_stride is negative";
    }
    if (job.rows == 0 || job.columns == 0) return nullptr;
    // A row may begin and end within the words of a counter.
    const std::int64_t counters = (job.columns + 2 * FillUniform::kWords - 2) / FillUniform::kWords;
    return launch(stream, divide_up(job.rows * counters, FillUniform::kLargestBlock), 1, FillUniform::kLargestBlock,
                  FillUniform{job, counters});
  }

  static constexpr GpuKernels table(const char* name) {
    return {name,        rms_norm,        add_rms_norm,  add,   rms_norm_backward, column_sums, rotate,
            swiglu,      swiglu_backward, cross_entropy, adamw, increment,         squares,     total,
            float8_amax, float8_cast,     uniform};
  }
};

}  // namespace phalanx::kernels::gpu
