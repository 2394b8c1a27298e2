// The time of each CUDA kernel at the sizes of a Llama of 1 billion parameters: median microseconds, bytes that have to
// be moved, and the share of a copy's bandwidth.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/kernels/gpu/testing/cuda_programs.h"
#include "phalanx/kernels/gpu/testing/gpu_kernels_test_support.h"

namespace phalanx::kernels::gpu {
namespace {

using namespace testing_support;

/// Times launches. Device memory is filled with small values of all types.
class Bench {
 public:
  Bench() {
    check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    constexpr std::size_t kBytes = std::size_t{1} << 30;
    const DeviceMemory from(kBytes), to(kBytes);
    const double us = median([&] {
      check(cudaMemcpyAsync(to.data, from.data, kBytes, cudaMemcpyDeviceToDevice, stream_), "copy");
      return nullptr;
    });
    copy_ = 2.0 * static_cast<double>(kBytes) / us;
    std::printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
    std::printf("%-44s %10s %10s %9s %8s\n", "kernel", "us", "MB", "GB/s", "of copy");
    print("copy of 1 GiB", us, 2.0 * static_cast<double>(kBytes));
  }
  ~Bench() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void* stream() const { return stream_; }

  /// 0x3c3c...: about 0.01 in each of the types.
  void* memory(Type type, std::int64_t count) {
    const auto bytes = static_cast<std::size_t>(count * size_of(type));
    memory_.push_back(std::make_unique<DeviceMemory>(bytes));
    check(cudaMemset(memory_.back()->data, 0x3c, bytes), "cudaMemset");
    return memory_.back()->data;
  }
  float* floats(std::int64_t count) { return static_cast<float*>(memory(Type::f32, count)); }

  void time(const std::string& name, std::int64_t bytes, const std::function<const char*()>& launch) {
    print(name, median(launch), static_cast<double>(bytes));
  }
  void free_all() {
    check(cudaStreamSynchronize(stream_), "synchronize");
    memory_.clear();
  }

 private:
  double median(const std::function<const char*()>& launch) {
    constexpr int kWarmups = 3, kRuns = 20;
    std::vector<float> times;
    for (int run = 0; run < kWarmups + kRuns; ++run) {
      check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
      check(launch());
      check(cudaEventRecord(end_, stream_), "cudaEventRecord");
      check(cudaEventSynchronize(end_), "a kernel");
      float ms = 0.0f;
      check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
      if (run >= kWarmups) times.push_back(ms * 1000.0f);
    }
    std::sort(times.begin(), times.end());
    return static_cast<double>(times[kRuns / 2]);
  }
  void print(const std::string& name, double us, double bytes) const {
    std::printf("%-44s %10.1f %10.1f %9.1f %7.1f%%\n", name.c_str(), us, bytes / 1e6, bytes / us / 1e3,
                100.0 * bytes / us / copy_);
    std::fflush(stdout);
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  double copy_ = 1.0;  // bytes a microsecond
};

void bench_norms(Bench& b, Type x_type, Type y_type, std::int64_t rows, std::int64_t dim) {
  const GpuKernels& k = *cuda_kernels();
  const std::int64_t count = rows * dim, blocks = rms_norm_backward_blocks(rows, dim);
  const std::int64_t x_bytes = count * size_of(x_type), y_bytes = count * size_of(y_type);
  const std::string what =
      std::string(" ") + name_of(x_type) + " to " + name_of(y_type) + ", dim " + std::to_string(dim);
  void *x = b.memory(x_type, count), *weight = b.memory(x_type, dim), *y = b.memory(y_type, count);
  void *h = b.memory(x_type, count), *delta = b.memory(y_type, count), *dx = b.memory(x_type, count);
  float *inverse = b.floats(rows), *partial = b.floats(blocks * dim);
  b.time("rms_norm" + what, x_bytes + y_bytes,
         [&] { return k.rms_norm(b.stream(), rows, dim, x_type, x, x_type, weight, kEps, y_type, y, inverse); });
  b.time("add_rms_norm" + what, 2 * x_bytes + 2 * y_bytes, [&] {
    return k.add_rms_norm(b.stream(), rows, dim, x_type, x, y_type, delta, h, x_type, weight, kEps, y_type, y, inverse);
  });
  for (void* const dh : {static_cast<void*>(nullptr), h}) {
    b.time((dh == nullptr ? "rms_norm_backward" : "rms_norm_backward, dh") + what,
           (dh == nullptr ? 2 : 3) * x_bytes + y_bytes + blocks * dim * 4, [&] {
             return k.rms_norm_backward(b.stream(), rows, dim, x_type, x, x_type, weight, inverse, y_type, y, dh, dx,
                                        y_type, nullptr, partial, blocks);
           });
  }
  b.time("add" + what, 2 * x_bytes + y_bytes, [&] { return k.add(b.stream(), count, x_type, x, y_type, delta, h); });
  if (x_type == Type::f32) {
    b.time("rms_norm_backward, dh and a copy" + what, 3 * x_bytes + 2 * y_bytes + blocks * dim * 4, [&] {
      return k.rms_norm_backward(b.stream(), rows, dim, x_type, x, x_type, weight, inverse, y_type, y, h, dx, y_type,
                                 delta, partial, blocks);
    });
  }
  b.time("column_sums, dim " + std::to_string(dim), blocks * dim * 4,
         [&] { return k.column_sums(b.stream(), blocks, dim, partial, x_type, weight); });
  b.free_all();
}

void bench_rotate(Bench& b, Type type, std::int64_t head_dim) {
  const GpuKernels& k = *cuda_kernels();
  const std::int64_t batch = 8, seq = 2048, width = 48 * head_dim, rows = batch * seq;  // q, k and v in one product
  void *qkv = b.memory(type, rows * width), *q = b.memory(type, rows * 32 * head_dim),
       *out = b.memory(type, rows * 8 * head_dim);
  float *cos = b.floats(seq * head_dim / 2), *sin = b.floats(seq * head_dim / 2);
  const RotateJob jobs[2] = {
      {qkv, seq * width, width, head_dim, 32, q},
      {static_cast<char*>(qkv) + 32 * head_dim * size_of(type), seq * width, width, head_dim, 8, out}};
  b.time(std::string("rotate 32 and 8 heads of ") + std::to_string(head_dim) + ", " + name_of(type),
         2 * rows * 40 * head_dim * size_of(type) + seq * head_dim * 4, [&] {
           return k.rotate(b.stream(), batch, seq, head_dim, type, {cos, sin, false, 1.0f}, jobs, 2);
         });
  b.free_all();
}

void bench_swiglu(Bench& b, Type type, bool halves) {
  const GpuKernels& k = *cuda_kernels();
  const std::int64_t rows = 16384, hidden = 8192, stride = halves ? 2 * hidden : hidden, size = size_of(type);
  const std::int64_t bytes = rows * hidden * size, second = (halves ? hidden : rows * hidden) * size;
  const std::string what = std::string(" ") + name_of(type) + (halves ? ", halves of a product" : "");
  char *both = static_cast<char*>(b.memory(type, 2 * rows * hidden)),
       *grads = static_cast<char*>(b.memory(type, 2 * rows * hidden));
  void *dy = b.memory(type, rows * hidden), *y = b.memory(type, rows * hidden);
  b.time("swiglu" + what, 3 * bytes,
         [&] { return k.swiglu(b.stream(), rows, hidden, type, both, stride, both + second, stride, y); });
  b.time("swiglu_backward" + what, 6 * bytes, [&] {
    return k.swiglu_backward(b.stream(), rows, hidden, type, both, stride, both + second, stride, dy, grads, stride,
                             grads + second, stride, y);
  });
  b.time("swiglu_backward without y" + what, 5 * bytes, [&] {
    return k.swiglu_backward(b.stream(), rows, hidden, type, both, stride, both + second, stride, dy, grads, stride,
                             grads + second, stride, nullptr);
  });
  b.free_all();
}

void bench_cross_entropy(Bench& b, Type type, std::int64_t vocab) {
  const GpuKernels& k = *cuda_kernels();
  const std::int64_t rows = 2048, bytes = rows * vocab * size_of(type);
  void* const logits = b.memory(type, rows * vocab);
  auto* const labels = static_cast<std::int64_t*>(b.memory(Type::f32, 2 * rows));
  check(cudaMemset(labels, 0, static_cast<std::size_t>(rows * 8)), "cudaMemset");
  float* const loss = b.floats(rows);
  const std::string what = std::string("cross_entropy ") + name_of(type) + ", vocab " + std::to_string(vocab);
  b.time(what + ", loss only", bytes,
         [&] { return k.cross_entropy(b.stream(), rows, vocab, vocab, type, logits, labels, 0.0f, 0.0f, loss); });
  b.time(what, 3 * bytes,
         [&] { return k.cross_entropy(b.stream(), rows, vocab, vocab, type, logits, labels, 1.0f, 0.0f, loss); });
  b.free_all();
}

void bench_lists(Bench& b, Type grad_type) {
  const GpuKernels& k = *cuda_kernels();
  const std::int64_t count = 4 << 20;
  const int tensors = 48;
  std::vector<AdamWTensor> table;
  std::vector<ConstTensor> grads;
  float* const step = b.floats(1);
  const float one = 1.0f;
  check(cudaMemcpy(step, &one, 4, cudaMemcpyHostToDevice), "upload");
  for (int t = 0; t < tensors; ++t) {
    table.push_back({count, b.floats(count), b.memory(grad_type, count), b.floats(count), b.floats(count),
                     grad_type == Type::f32 ? nullptr : b.memory(grad_type, count), step});
    grads.push_back({count, table.back().grad});
  }
  const std::int64_t all = tensors * count, blocks = squares_blocks(tensors, grads.data());
  auto* const partial = static_cast<double*>(b.memory(Type::f32, 2 * (blocks + 1)));
  b.time(std::string("adamw, 201 M parameters, gradients ") + name_of(grad_type),
         all * (24 + (grad_type == Type::f32 ? 4 : 2 * size_of(grad_type))), [&] {
           return k.adamw(b.stream(), tensors, table.data(),
                          {1e-4, 0.9, 0.95, 1e-8, 0.1, grad_type, grad_type, nullptr, nullptr});
         });
  b.time(std::string("squares of 201 M values ") + name_of(grad_type), all * size_of(grad_type),
         [&] { return k.squares(b.stream(), tensors, grads.data(), grad_type, partial); });
  b.time("total", blocks * 8, [&] { return k.total(b.stream(), blocks, partial, partial + blocks); });
  b.free_all();
}

void bench_float8(Bench& b, Type type, std::int64_t rows, std::int64_t columns) {
  const GpuKernels& k = *cuda_kernels();
  const std::int64_t count = rows * columns;
  void *const x = b.memory(type, count), *const plain = b.memory(Type::bf16, count / 2);
  void* const turned = b.memory(Type::bf16, count / 2);
  float *const all = b.floats(1), *const of_rows = b.floats(rows), *const of_columns = b.floats(columns);
  float *const inverse = b.floats(rows), *const inverse_t = b.floats(columns);
  const std::string what =
      std::string(" ") + name_of(type) + " [" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
  b.time("float8_amax of all" + what, count * size_of(type),
         [&] { return k.float8_amax(b.stream(), rows, columns, type, x, false, all, nullptr, nullptr); });
  b.time("float8_amax of lines" + what, count * size_of(type),
         [&] { return k.float8_amax(b.stream(), rows, columns, type, x, false, nullptr, of_rows, of_columns); });
  for (const bool by_line : {false, true}) {
    const Float8Target one{plain, by_line ? of_rows : all, inverse}, two{turned, by_line ? of_columns : all, inverse_t};
    const auto cast = [&](const char* name, std::int64_t written, const Float8Target& to, const Float8Target& to_t) {
      b.time(name + std::string(by_line ? " by line" : "") + what, count * (size_of(type) + written), [&] {
        return k.float8_cast(b.stream(), {rows, columns, type, x, false, Float8Type::e4m3, by_line, to, to_t});
      });
    };
    cast("float8_cast", 1, one, {});
    cast("float8_cast, transposed", 1, {}, two);
    cast("float8_cast, both", 2, one, two);
  }
  b.free_all();
}

}  // namespace

int bench() {
  if (!have_gpu()) {
    std::printf("no GPU\n");
    return 0;
  }
  Bench b;
  for (const std::int64_t dim : {2048, 4096, 8192}) bench_norms(b, Type::bf16, Type::bf16, 16384, dim);
  bench_norms(b, Type::bf16, Type::bf16, 16384 * 32, 64);
  bench_norms(b, Type::bf16, Type::bf16, 16384 * 32, 128);
  bench_norms(b, Type::f32, Type::bf16, 16384, 2048);
  bench_norms(b, Type::f32, Type::f32, 16384, 2048);
  bench_rotate(b, Type::bf16, 64);
  bench_rotate(b, Type::bf16, 128);
  bench_rotate(b, Type::f32, 64);
  bench_swiglu(b, Type::bf16, false);
  bench_swiglu(b, Type::bf16, true);
  bench_swiglu(b, Type::f32, false);
  for (const std::int64_t vocab : {128256, 50257}) bench_cross_entropy(b, Type::bf16, vocab);
  bench_cross_entropy(b, Type::f32, 128256);
  bench_lists(b, Type::bf16);
  bench_lists(b, Type::f32);
  bench_float8(b, Type::bf16, 16384, 2048);
  bench_float8(b, Type::bf16, 16384, 8192);
  bench_float8(b, Type::f32, 8192, 2048);
  return 0;
}

}  // namespace phalanx::kernels::gpu
