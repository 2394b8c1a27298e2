// The CUDA kernels on a GPU against the same kernels on the host, bit by bit where both have the same operations.
// Skipped where there is no GPU.
//
//   kernels_gpu_cuda_test            the comparisons
//   kernels_gpu_cuda_test --bench    the time of each kernel at the sizes of a Llama of 1 billion parameters: median
//                                    microseconds, bytes that have to be moved, and the share of a copy's bandwidth
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/gpu/storage.h"
#include "phalanx/kernels/gpu/testing/cuda_programs.h"
#include "phalanx/kernels/gpu/testing/gpu_kernels_test_support.h"

namespace phalanx::kernels::gpu {
namespace {

using namespace testing_support;

/// An argument of a kernel: one array in the host's memory and one in the GPU's, both beginning with the same values,
/// `offset` elements past a multiple of 16 bytes.
class Argument {
 public:
  enum class Kind { f32, bf16, f16, f64, u8 };

  Argument(Kind kind, std::int64_t count, std::int64_t offset, int seed)
      : kind_(kind),
        count_(count),
        begin_(static_cast<std::size_t>(offset * size())),
        bytes_(begin_ + static_cast<std::size_t>(count * size())),
        host_(static_cast<unsigned char*>(std::aligned_alloc(64, (bytes_ + 127) / 64 * 64)), &std::free),
        device_(std::make_unique<DeviceMemory>(bytes_ + 64)) {
    std::memset(host_.get(), 0, bytes_);
    if (seed == 0) return;
    std::mt19937 generator(static_cast<unsigned>(seed));
    std::uniform_real_distribution<float> values(-4.0f, 4.0f);
    for (std::int64_t i = 0; i < count; ++i) set(i, values(generator));
  }
  Argument(Type type, std::int64_t count, std::int64_t offset, int seed)
      : Argument(type == Type::f32    ? Kind::f32
                 : type == Type::bf16 ? Kind::bf16
                                      : Kind::f16,
                 count, offset, seed) {}

  void set(std::int64_t i, float value) {
    if (kind_ == Kind::f32) *static_cast<float*>(at(i)) = value;
    if (kind_ == Kind::bf16) *static_cast<Bf16*>(at(i)) = from_float<Bf16>(value);
    if (kind_ == Kind::f16) *static_cast<F16*>(at(i)) = from_float<F16>(value);
    if (kind_ == Kind::f64) *static_cast<double*>(at(i)) = static_cast<double>(value);
    if (kind_ == Kind::u8) *static_cast<unsigned char*>(at(i)) = static_cast<unsigned char>(value);
  }
  double operator[](std::int64_t i) {
    if (kind_ == Kind::f32) return static_cast<double>(*static_cast<float*>(at(i)));
    if (kind_ == Kind::bf16) return static_cast<double>(to_float(*static_cast<Bf16*>(at(i))));
    if (kind_ == Kind::f16) return static_cast<double>(to_float(*static_cast<F16*>(at(i))));
    if (kind_ == Kind::u8) return static_cast<double>(*static_cast<unsigned char*>(at(i)));
    return *static_cast<double*>(at(i));
  }
  std::int64_t count() const { return count_; }
  /// Where a table's kernels find it.
  void* of(const GpuKernels& kernels, std::int64_t element = 0) {
    unsigned char* const base = &kernels == &host_kernels() ? host_.get() : static_cast<unsigned char*>(device_->data);
    return base + begin_ + static_cast<std::size_t>(element * size());
  }
  template <class T>
  T* as(const GpuKernels& kernels) {
    return static_cast<T*>(of(kernels));
  }
  void upload() { check(cudaMemcpy(device_->data, host_.get(), bytes_, cudaMemcpyHostToDevice), "upload"); }
  /// In place of the host's values.
  void download() { check(cudaMemcpy(host_.get(), device_->data, bytes_, cudaMemcpyDeviceToHost), "download"); }

  /// The distance of the type's values around x.
  double ulp(double x) const {
    const int bits = kind_ == Kind::f32 ? 23 : kind_ == Kind::bf16 ? 7 : kind_ == Kind::f16 ? 10 : 52;
    const int smallest = kind_ == Kind::f16 ? -14 : kind_ == Kind::f64 ? -1022 : -126;
    return std::ldexp(1.0, std::max(x == 0.0 ? smallest : std::ilogb(x), smallest) - bits);
  }

 private:
  std::int64_t size() const { return kind_ == Kind::u8 ? 1 : kind_ == Kind::f64 ? 8 : kind_ == Kind::f32 ? 4 : 2; }
  void* at(std::int64_t i) { return of(host_kernels(), i); }

  Kind kind_;
  std::int64_t count_;
  std::size_t begin_, bytes_;
  std::unique_ptr<unsigned char, decltype(&std::free)> host_;
  std::unique_ptr<DeviceMemory> device_;
};

/// What an output may differ by: this many units in its last place, and this much.
struct Output {
  Argument* values;
  double ulps = 0.0, absolute = 0.0;
};

/// Runs a kernel on both sides and compares its outputs.
void expect_same(const std::string& what, const std::vector<Argument*>& arguments, const std::vector<Output>& outputs,
                 const std::function<const char*(const GpuKernels&)>& run) {
  for (Argument* argument : arguments) argument->upload();
  for (const Output& output : outputs) output.values->upload();
  check(run(*cuda_kernels()));
  check(run(host_kernels()));
  check(cudaDeviceSynchronize(), what.c_str());
  int number = 0;
  for (const Output& output : outputs) {
    Argument& values = *output.values;
    std::vector<double> want;
    for (std::int64_t i = 0; i < values.count(); ++i) want.push_back(values[i]);
    values.download();
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < values.count(); ++i) {
      const double got = values[i], expected = want[static_cast<std::size_t>(i)];
      const double tolerance = output.ulps * values.ulp(expected) + output.absolute;
      const bool same = std::isnan(expected) ? std::isnan(got) : std::abs(got - expected) <= tolerance;
      if (!same && wrong++ == 0) {
        ADD_FAILURE() << what << ", output " << number << ", element " << i << " of " << values.count() << ": " << got
                      << " on the GPU, " << expected << " on the host, tolerance " << tolerance;
      }
    }
    EXPECT_EQ(wrong, 0) << what << ", output " << number;
    ++number;
  }
}

class CudaKernels : public testing::Test {
 protected:
  void SetUp() override {
    if (!have_gpu()) GTEST_SKIP() << "no GPU";
  }
};

constexpr std::int64_t kDims[] = {1,    7,        8,    64,       100,  128,      256,      1000,
                                  2048, 4096 + 3, 4096, 4096 + 8, 8192, 8192 + 8, 16384 + 8};

// Square roots and divisions are correctly rounded on both sides, sums add in the same tree: equal bits.
TEST_F(CudaKernels, Norms) {
  for (const NormTypes& t : kNormTypes) {
    for (const std::int64_t dim : kDims) {
      for (const std::int64_t offset : {0, 1}) {
        const std::int64_t rows = 5, blocks = 3, count = rows * dim;
        const std::string what = std::string(name_of(t.x)) + " " + name_of(t.weight) + " " + name_of(t.y) + " dim " +
                                 std::to_string(dim) + " offset " + std::to_string(offset);
        Argument x(t.x, count, offset, 1), weight(t.weight, dim, offset, 2), delta(t.delta, count, offset, 3);
        Argument y(t.y, count, offset, 0), h(t.x, count, offset, 0), inverse(Type::f32, rows, 0, 0);
        Argument dy(t.y, count, offset, 4), dx(t.x, count, offset, 0), dh(t.x, count, offset, 5);
        Argument copy(Type::bf16, count, offset, 0);
        Argument partial(Type::f32, blocks * dim, offset, 6), dweight(t.weight, dim, offset, 0);
        expect_same("rms_norm " + what, {&x, &weight}, {{&y}, {&inverse}}, [&](const GpuKernels& k) {
          return k.rms_norm(nullptr, rows, dim, t.x, x.of(k), t.weight, weight.of(k), kEps, t.y, y.of(k),
                            inverse.as<float>(k));
        });
        expect_same("add_rms_norm " + what, {&x, &weight, &delta}, {{&y}, {&h}, {&inverse}}, [&](const GpuKernels& k) {
          return k.add_rms_norm(nullptr, rows, dim, t.x, x.of(k), t.delta, delta.of(k), h.of(k), t.weight, weight.of(k),
                                kEps, t.y, y.of(k), inverse.as<float>(k));
        });
        expect_same("add " + what, {&x, &delta}, {{&h}}, [&](const GpuKernels& k) {
          return k.add(nullptr, count, t.x, x.of(k), t.delta, delta.of(k), h.of(k));
        });
        for (const bool added : {false, true}) {
          expect_same("rms_norm_backward " + what, {&x, &weight, &dy, &dh, &inverse}, {{&dx}, {&copy}, {&partial}},
                      [&](const GpuKernels& k) {
                        return k.rms_norm_backward(nullptr, rows, dim, t.x, x.of(k), t.weight, weight.of(k),
                                                   inverse.as<float>(k), t.y, dy.of(k), added ? dh.of(k) : nullptr,
                                                   dx.of(k), Type::bf16, t.x == Type::f32 ? copy.of(k) : nullptr,
                                                   partial.as<float>(k), blocks);
                      });
        }
        expect_same("column_sums " + what, {&partial}, {{&dweight}}, [&](const GpuKernels& k) {
          return k.column_sums(nullptr, blocks, dim, partial.as<float>(k), t.weight, dweight.of(k));
        });
      }
    }
  }
}

void expect_same_with_many_rows(std::int64_t rows, std::int64_t dim) {
  const std::int64_t blocks = rms_norm_backward_blocks(rows, dim);
  Argument x(Type::bf16, rows * dim, 0, 1), weight(Type::bf16, dim, 0, 2), dy(Type::bf16, rows * dim, 0, 3);
  Argument inverse(Type::f32, rows, 0, 0), y(Type::bf16, rows * dim, 0, 0), dx(Type::bf16, rows * dim, 0, 0);
  Argument partial(Type::f32, blocks * dim, 0, 0), dweight(Type::f32, dim, 0, 0);
  expect_same("rms_norm", {&x, &weight}, {{&y}, {&inverse}}, [&](const GpuKernels& k) {
    return k.rms_norm(nullptr, rows, dim, Type::bf16, x.of(k), Type::bf16, weight.of(k), kEps, Type::bf16, y.of(k),
                      inverse.as<float>(k));
  });
  expect_same("rms_norm_backward", {&x, &weight, &dy, &inverse}, {{&dx}, {&partial}}, [&](const GpuKernels& k) {
    return k.rms_norm_backward(nullptr, rows, dim, Type::bf16, x.of(k), Type::bf16, weight.of(k), inverse.as<float>(k),
                               Type::bf16, dy.of(k), nullptr, dx.of(k), Type::f32, nullptr, partial.as<float>(k),
                               blocks);
  });
  expect_same("column_sums", {&partial}, {{&dweight}}, [&](const GpuKernels& k) {
    return k.column_sums(nullptr, blocks, dim, partial.as<float>(k), Type::f32, dweight.of(k));
  });
}

TEST_F(CudaKernels, ManyRowsAndBlocks) {
  expect_same_with_many_rows(3000, 512);
  expect_same_with_many_rows(10001, 64);  // several rows a warp; and more blocks than 2048
  expect_same_with_many_rows(9999, 128);
}

TEST_F(CudaKernels, Rotate) {
  const std::int64_t batch = 2, seq = 37;
  for (const Type type : kTypes) {
    for (const std::int64_t half : {1, 7, 32, 64}) {
      for (const std::int64_t offset : {0, 1}) {
        for (const bool per_row : {false, true}) {
          const std::int64_t head = 2 * half;
          Argument q(type, batch * 6 * seq * head, offset, 1), k_in(type, batch * seq * 4 * head, offset, 2);
          Argument q_out(type, q.count(), offset, 0), k_out(type, batch * seq * 2 * head, offset, 0);
          Argument cos(Type::f32, batch * seq * half, offset, 3), sin(Type::f32, batch * seq * half, offset, 4);
          expect_same(std::string("rotate ") + name_of(type) + " half " + std::to_string(half), {&q, &k_in, &cos, &sin},
                      {{&q_out}, {&k_out}}, [&](const GpuKernels& k) {
                        const RotateJob jobs[2] = {{q.of(k), 6 * seq * head, head, seq * head, 6, q_out.of(k)},
                                                   {k_in.of(k), seq * 4 * head, 4 * head, head, 2, k_out.of(k)}};
                        return k.rotate(nullptr, batch, seq, head, type,
                                        {cos.as<float>(k), sin.as<float>(k), per_row, -1.0f}, jobs, 2);
                      });
        }
      }
    }
  }
}

// CUDA's expf is within 2 units in the last place, and 16-bit types divide by an approximation: each result within 8
// units of float, or 1 unit of a 16-bit type, of the larger of its terms.
TEST_F(CudaKernels, Swiglu) {
  for (const Type type : kTypes) {
    for (const std::int64_t hidden : {1, 7, 64, 4096 + 8, 8192 + 3}) {
      for (const std::int64_t stride : {hidden, 2 * hidden, 2 * hidden + 5}) {
        for (const std::int64_t offset : {0, 1}) {
          const std::int64_t rows = 3;
          const std::string what = std::string(name_of(type)) + " hidden " + std::to_string(hidden) + " stride " +
                                   std::to_string(stride) + " offset " + std::to_string(offset);
          Argument gate(type, rows * stride, offset, 1), up(type, rows * stride, offset, 2);
          Argument dy(type, rows * hidden, offset, 3), y(type, rows * hidden, offset, 0);
          Argument dgate(type, rows * stride, offset, 0), dup(type, rows * stride, offset, 0);
          const double ulps = type == Type::f32 ? 8.0 : 1.0;
          expect_same("swiglu " + what, {&gate, &up}, {{&y, ulps}}, [&](const GpuKernels& k) {
            return k.swiglu(nullptr, rows, hidden, type, gate.of(k), stride, up.of(k), stride, y.of(k));
          });
          // dgate is a sum that may cancel: of terms below 4 * 4 * 5.
          expect_same("swiglu_backward " + what, {&gate, &up, &dy},
                      {{&dgate, ulps, 80 * 0x1p-21}, {&dup, ulps}, {&y, ulps}}, [&](const GpuKernels& k) {
                        return k.swiglu_backward(nullptr, rows, hidden, type, gate.of(k), stride, up.of(k), stride,
                                                 dy.of(k), dgate.of(k), stride, dup.of(k), stride, y.of(k));
                      });
        }
      }
    }
  }
}

// Exponentials as above, of differences up to 8; logarithms within 2 units, of sums up to 150,000 values.
TEST_F(CudaKernels, CrossEntropy) {
  for (const Type type : kTypes) {
    for (const std::int64_t vocab : {1, 7, 100, 1001, 32000, 50257, 151936}) {
      for (const std::int64_t offset : {0, 1}) {
        for (const float scale : {0.0f, 0.125f}) {
          const std::int64_t rows = 5, stride = vocab + 3 * offset;
          Argument logits(type, rows * stride, offset, 1), loss(Type::f32, rows, 0, 7),
              labels(Argument::Kind::f64, rows, 0, 0);
          const std::int64_t wanted[] = {0, vocab / 2, vocab - 1, kIgnoredLabel, vocab};
          std::memcpy(labels.of(host_kernels()), wanted, sizeof(wanted));
          const double s = static_cast<double>(scale);
          expect_same(std::string("cross_entropy ") + name_of(type) + " vocab " + std::to_string(vocab), {&labels},
                      {{&logits, 1.0, s * 0x1p-19}, {&loss, 8.0, 0x1p-18}}, [&](const GpuKernels& k) {
                        return k.cross_entropy(nullptr, rows, vocab, stride, type, logits.of(k),
                                               labels.as<std::int64_t>(k), scale, scale / 8, loss.as<float>(k));
                      });
        }
      }
    }
  }
}

TEST_F(CudaKernels, AdamWAndItsCounters) {
  for (const Type grad_type : kTypes) {
    for (const Type copy_type : kTypes) {
      std::vector<std::unique_ptr<Argument>> owned;
      std::vector<Argument*> arguments;
      std::vector<Output> outputs;
      const auto make = [&](Type type, std::int64_t count, std::int64_t offset, int seed, bool output) {
        owned.push_back(std::make_unique<Argument>(type, count, offset, seed));
        if (output) {
          outputs.push_back({owned.back().get()});
        } else {
          arguments.push_back(owned.back().get());
        }
        return owned.back().get();
      };
      struct Tensor {
        Argument *parameter, *grad, *average, *square, *copy, *step;
      };
      std::vector<Tensor> tensors;
      for (int t = 0; t < 60; ++t) {
        const std::int64_t count = t == 50 ? 40001 : 1 + 97 * t, offset = t % 3 == 0 ? 1 : 0;
        tensors.push_back({make(Type::f32, count, offset, 1, true), make(grad_type, count, offset, 2, false),
                           make(Type::f32, count, offset, 3, true), make(Type::f32, count, offset, 4, true),
                           make(copy_type, count, offset, 0, true), make(Type::f32, 1, 0, 0, true)});
        for (std::int64_t i = 0; i < count; ++i) {
          tensors.back().square->set(i, static_cast<float>(std::abs((*tensors.back().square)[i])));
        }
        tensors.back().step->set(0, static_cast<float>(t * t));
      }
      Argument scale(Type::f32, 1, 0, 0), skip(Type::f32, 1, 0, 0);
      scale.set(0, 0.37f);
      arguments.insert(arguments.end(), {&scale, &skip});
      for (const float skipped : {0.0f, 1.0f}) {
        skip.set(0, skipped);
        expect_same(std::string("adamw ") + name_of(grad_type) + " " + name_of(copy_type), arguments, outputs,
                    [&](const GpuKernels& k) {
                      std::vector<AdamWTensor> table;
                      std::vector<float*> steps;
                      for (const Tensor& t : tensors) {
                        steps.push_back(t.step->as<float>(k));
                        table.push_back({t.parameter->count(), t.parameter->as<float>(k), t.grad->of(k),
                                         t.average->as<float>(k), t.square->as<float>(k), t.copy->of(k), steps.back()});
                      }
                      const int count = static_cast<int>(table.size());
                      if (const char* error = k.increment(nullptr, count, steps.data(), skip.as<float>(k)))
                        return error;
                      return k.adamw(
                          nullptr, count, table.data(),
                          {1e-2, 0.9, 0.95, 1e-8, 0.1, grad_type, copy_type, scale.as<float>(k), skip.as<float>(k)});
                    });
      }
    }
  }
}

TEST_F(CudaKernels, Uniform) {
  for (const std::int64_t columns : {1, 7, 64, 4099}) {
    Argument out(Type::f32, 33 * columns, 0, 0);
    expect_same("uniform", {}, {{&out}}, [&](const GpuKernels& k) {
      return k.uniform(nullptr, {.key = 77,
                                 .rows = 33,
                                 .columns = columns,
                                 .first = 5,
                                 .row_stride = 2 * columns,
                                 .low = 0.0f,
                                 .high = 1.0f,
                                 .out = out.as<float>(k)});
    });
  }
}

TEST_F(CudaKernels, Squares) {
  for (const Type type : kTypes) {
    std::vector<std::unique_ptr<Argument>> owned;
    std::vector<Argument*> arguments;
    std::vector<ConstTensor> sizes;
    for (int t = 0; t < 140; ++t) {
      const std::int64_t count = t == 3 ? 0 : t == 4 ? 65536 : t == 130 ? 2 * 65536 + 77 : 1 + 5 * t;
      owned.push_back(std::make_unique<Argument>(type, count, t % 2, t + 1));
      arguments.push_back(owned.back().get());
      sizes.push_back({count, nullptr});
    }
    const std::int64_t blocks = squares_blocks(140, sizes.data());
    Argument partial(Argument::Kind::f64, blocks, 0, 0), total(Argument::Kind::f64, 1, 0, 0);
    expect_same(std::string("squares ") + name_of(type), arguments, {{&partial}, {&total}}, [&](const GpuKernels& k) {
      std::vector<ConstTensor> tensors;
      for (Argument* argument : arguments) tensors.push_back({argument->count(), argument->of(k)});
      if (const char* error = k.squares(nullptr, 140, tensors.data(), type, partial.as<double>(k))) return error;
      return k.total(nullptr, blocks, partial.as<double>(k), total.as<double>(k));
    });
  }
}

// Bit by bit. A NaN may be any NaN; it is compared as the byte that both make.
TEST_F(CudaKernels, Float8) {
  using Sizes = std::pair<std::int64_t, std::int64_t>;
  for (const Type type : kTypes) {
    for (const auto& [rows, columns] : {Sizes{1, 16}, {16, 144}, {77, 272}, {300, 1040}}) {
      for (const bool via_bf16 : {false, true}) {
        if (via_bf16 && type != Type::f32) continue;
        const std::int64_t padded = (rows + 15) / 16 * 16;
        Argument x(type, rows * columns, 0, 1), all(Type::f32, 1, 0, 0), of_rows(Type::f32, rows, 0, 0),
            of_columns(Type::f32, columns, 0, 0);
        for (std::int64_t i = 0; i < x.count(); i += 3) x.set(i, static_cast<float>(x[i]) * 1e-4f);  // small ones, too
        const std::string what = std::string(name_of(type)) + " [" + std::to_string(rows) + ", " +
                                 std::to_string(columns) + "]" + (via_bf16 ? " via bf16" : "");
        expect_same("float8_amax " + what, {&x}, {{&all}, {&of_rows}, {&of_columns}}, [&](const GpuKernels& k) {
          return k.float8_amax(nullptr, rows, columns, type, x.of(k), via_bf16, all.as<float>(k), of_rows.as<float>(k),
                               of_columns.as<float>(k));
        });
        for (const Float8Type to : {Float8Type::e4m3, Float8Type::e5m2}) {
          for (const bool by_line : {false, true}) {
            for (const int wanted : {1, 2, 3}) {
              Argument plain(Argument::Kind::u8, rows * columns, 0, 0),
                  turned(Argument::Kind::u8, columns * padded, 0, 7);
              Argument inverse(Type::f32, rows, 0, 0), inverse_t(Type::f32, columns, 0, 0);
              const auto job = [&](const GpuKernels& k) {
                Float8CastJob made{rows, columns, type, x.of(k), via_bf16, to, by_line, {}, {}};
                if ((wanted & 1) != 0) {
                  made.plain = {plain.of(k), by_line ? of_rows.as<float>(k) : all.as<float>(k), inverse.as<float>(k)};
                }
                if ((wanted & 2) != 0) {
                  made.transposed = {turned.of(k), by_line ? of_columns.as<float>(k) : all.as<float>(k),
                                     inverse_t.as<float>(k)};
                }
                return made;
              };
              expect_same("float8_cast " + what + (by_line ? " by line " : " ") + std::to_string(wanted),
                          {&x, &all, &of_rows, &of_columns}, {{&plain}, {&turned}, {&inverse}, {&inverse_t}},
                          [&](const GpuKernels& k) { return k.float8_cast(nullptr, job(k)); });
            }
          }
        }
      }
    }
  }
}

// So many that each block looks at several places.
TEST_F(CudaKernels, Float8AmaxOfMany) {
  constexpr std::int64_t kRows = 4096, kColumns = 8192;
  Argument x(Type::bf16, kRows * kColumns, 0, 1);
  for (const std::int64_t at : {std::int64_t{0}, kRows * kColumns / 2 + 77, kRows * kColumns - 1}) {
    Argument all(Type::f32, 1, 0, 0), of_rows(Type::f32, kRows, 0, 0), of_columns(Type::f32, kColumns, 0, 0);
    const auto before = static_cast<float>(x[at]);
    x.set(at, -100.0f);
    expect_same("float8_amax of many", {&x}, {{&all}, {&of_rows}, {&of_columns}}, [&](const GpuKernels& k) {
      return k.float8_amax(nullptr, kRows, kColumns, Type::bf16, x.of(k), false, all.as<float>(k), of_rows.as<float>(k),
                           of_columns.as<float>(k));
    });
    EXPECT_EQ(all[0], 100.0);
    x.set(at, before);
  }
}

TEST_F(CudaKernels, Float8KeepsWhatIsNotFinite) {
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    for (const Float8Type to : {Float8Type::e4m3, Float8Type::e5m2}) {
      Argument x(Type::bf16, 32 * 32, 0, 1), amax(Type::f32, 1, 0, 0), inverse(Type::f32, 1, 0, 0);
      Argument plain(Argument::Kind::u8, 32 * 32, 0, 0);
      x.set(100, bad);
      for (Argument* argument : {&x, &amax, &inverse, &plain}) argument->upload();
      const GpuKernels& k = *cuda_kernels();
      check(k.float8_amax(nullptr, 32, 32, Type::bf16, x.of(k), false, amax.as<float>(k), nullptr, nullptr));
      check(k.float8_cast(
          nullptr,
          {32, 32, Type::bf16, x.of(k), false, to, false, {plain.of(k), amax.as<float>(k), inverse.as<float>(k)}, {}}));
      check(cudaDeviceSynchronize(), "float8");
      amax.download(), plain.download();
      EXPECT_FALSE(std::isfinite(amax[0]));
      const int byte = static_cast<int>(plain[100]) & 0x7f;
      EXPECT_TRUE(byte == 0x7f || (to == Float8Type::e5m2 && byte > 0x7c)) << byte;
    }
  }
}

TEST_F(CudaKernels, LaunchesThatCudaRefusesAreErrors) {
  Argument x(Type::f32, 8, 0, 0);
  float* const f = x.as<float>(*cuda_kernels());
  EXPECT_NE(
      cuda_kernels()->rms_norm(nullptr, std::int64_t{1} << 40, 8, Type::f32, f, Type::f32, f, kEps, Type::f32, f, f),
      nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace phalanx::kernels::gpu

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc == 2 && std::strcmp(argv[1], "--bench") == 0) return phalanx::kernels::gpu::bench();
  return RUN_ALL_TESTS();
}
