// The table of Phalanx's own GPU kernels for the simulated devices: each call is one launch of the kernel's host build.
#include "phalanx/kernels/gpu/gpu_kernels.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/kernels/gpu/kernels_body.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/testing/sim_device/torch/kernel_tensors.h"
#include "phalanx/testing/sim_device/torch/registration.h"
#include "phalanx/testing/sim_device/torch/sim_streams.h"

namespace phalanx::sim_device {
namespace {

using namespace kernels::gpu;

// Launches nothing: what is left are the checks of arguments, which come before the launch on a GPU too.
struct NoLauncher {
  template <class Body>
  static const char* run(void* /*stream*/, std::int64_t /*blocks*/, int /*blocks_y*/, int /*lanes*/, const Body&) {
    return nullptr;
  }
};
constexpr GpuKernels kChecks = Kernels<NoLauncher>::table("checks");

std::size_t size_of(Type type) { return type == Type::f32 ? sizeof(float) : sizeof(Bf16); }

// A copy of a table of tensors, which is read before a call returns.
template <class T>
struct Table {
  std::vector<T> values;
  operator const T*() const { return values.data(); }  // NOLINT: an argument in the table's place
};

// Collects what a kernel reads and writes, and launches it. Pointers become those that a kernel may use.
class KernelCall {
 public:
  KernelCall(void* stream, const char* name) : stream_(stream_of_handle(stream)), name_(name) {}

  /// Strides: of elements; none: contiguous. A null pointer stays one.
  const void* reads(const void* values, Type type, at::IntArrayRef sizes, at::IntArrayRef strides = {}) {
    return touches(values, size_of(type), sizes, strides, false);
  }
  void* writes(void* values, Type type, at::IntArrayRef sizes, at::IntArrayRef strides = {}) {
    return touches(values, size_of(type), sizes, strides, true);
  }
  template <class T>
  const T* reads(const T* values, at::IntArrayRef sizes) {
    return static_cast<const T*>(touches(values, sizeof(T), sizes, {}, false));
  }
  template <class T>
  T* writes(T* values, at::IntArrayRef sizes) {
    return static_cast<T*>(touches(values, sizeof(T), sizes, {}, true));
  }
  template <class T>
  T* updates(T* values, at::IntArrayRef sizes) {
    reads(values, sizes);
    return writes(values, sizes);
  }

  /// Launches the kernel with these arguments, behind the stream.
  template <auto kKernel, class... Arguments>
  const char* launch(Arguments... arguments) {
    if (const char* error = (kChecks.*kKernel)(nullptr, arguments...)) return error;
    if (stream_.device != current_device()) return "the stream is not of the current device";
    if (is_elsewhere_) return "an argument is not in this device's memory";
    if (accesses_.empty()) return nullptr;
    sim_backend().runtime.launch(stream_, {name_, std::move(accesses_), [=] {
                                             if (const char* error = (host_kernels().*kKernel)(nullptr, arguments...)) {
                                               throw Error(error);
                                             }
                                           }});
    return nullptr;
  }

 private:
  void* touches(const void* values, std::size_t itemsize, at::IntArrayRef sizes, at::IntArrayRef strides,
                bool is_write) {
    if (values == nullptr || std::ranges::any_of(sizes, [](std::int64_t size) { return size <= 0; })) return nullptr;
    std::vector<std::int64_t> steps = strides.vec();
    if (strides.empty()) {
      steps.resize(sizes.size());
      std::int64_t step = 1;
      for (std::size_t d = sizes.size(); d-- > 0; step *= sizes[d]) steps[d] = step;
    }
    const Runtime& runtime = sim_backend().runtime;
    is_elsewhere_ |= !is_on_device(values);
    add_accesses(accesses_, values, itemsize, sizes, steps, is_write);
    return runtime.kernel_view(values);
  }
  bool is_on_device(const void* values) const {
    SimBackend& backend = sim_backend();
    if (backend.runtime.pinned().owns(values)) return true;
    const DeviceMemory& memory = backend.runtime.memory();
    return memory.owns(values) && memory.device_of(values) == stream_.device;
  }

  StreamId stream_;
  const char* name_;
  std::vector<Access> accesses_;
  bool is_elsewhere_ = false;
};

const char* rms_norm(void* stream, std::int64_t rows, std::int64_t dim, Type x_type, const void* x, Type weight_type,
                     const void* weight, float eps, Type y_type, void* y, float* inverse_rms) {
  KernelCall call(stream, "rms_norm");
  return call.launch<&GpuKernels::rms_norm>(rows, dim, x_type, call.reads(x, x_type, {rows, dim}), weight_type,
                                            call.reads(weight, weight_type, {dim}), eps, y_type,
                                            call.writes(y, y_type, {rows, dim}), call.writes(inverse_rms, {rows}));
}

const char* add_rms_norm(void* stream, std::int64_t rows, std::int64_t dim, Type x_type, const void* x, Type delta_type,
                         const void* delta, void* h, Type weight_type, const void* weight, float eps, Type y_type,
                         void* y, float* inverse_rms) {
  KernelCall call(stream, "add_rms_norm");
  return call.launch<&GpuKernels::add_rms_norm>(
      rows, dim, x_type, call.reads(x, x_type, {rows, dim}), delta_type, call.reads(delta, delta_type, {rows, dim}),
      call.writes(h, x_type, {rows, dim}), weight_type, call.reads(weight, weight_type, {dim}), eps, y_type,
      call.writes(y, y_type, {rows, dim}), call.writes(inverse_rms, {rows}));
}

const char* add(void* stream, std::int64_t count, Type x_type, const void* x, Type delta_type, const void* delta,
                void* h) {
  KernelCall call(stream, "add");
  return call.launch<&GpuKernels::add>(count, x_type, call.reads(x, x_type, {count}), delta_type,
                                       call.reads(delta, delta_type, {count}), call.writes(h, x_type, {count}));
}

const char* rms_norm_backward(void* stream, std::int64_t rows, std::int64_t dim, Type x_type, const void* x,
                              Type weight_type, const void* weight, const float* inverse_rms, Type dy_type,
                              const void* dy, const void* dh, void* dx, Type copy_type, void* copy, float* partial,
                              std::int64_t blocks) {
  KernelCall call(stream, "rms_norm_backward");
  return call.launch<&GpuKernels::rms_norm_backward>(
      rows, dim, x_type, call.reads(x, x_type, {rows, dim}), weight_type, call.reads(weight, weight_type, {dim}),
      call.reads(inverse_rms, {rows}), dy_type, call.reads(dy, dy_type, {rows, dim}),
      call.reads(dh, x_type, {rows, dim}), call.writes(dx, x_type, {rows, dim}), copy_type,
      call.writes(copy, copy_type, {rows, dim}), call.writes(partial, {blocks, dim}), blocks);
}

const char* column_sums(void* stream, std::int64_t blocks, std::int64_t dim, const float* partial, Type out_type,
                        void* out) {
  KernelCall call(stream, "column_sums");
  return call.launch<&GpuKernels::column_sums>(blocks, dim, call.reads(partial, {blocks, dim}), out_type,
                                               call.writes(out, out_type, {dim}));
}

const char* rotate(void* stream, std::int64_t batch, std::int64_t seq, std::int64_t head_dim, Type type,
                   const RotateAngles& angles, const RotateJob* jobs, int count) {
  KernelCall call(stream, "rotate");
  Table<RotateJob> table;
  for (int i = 0; i < count; ++i) {
    RotateJob& job = table.values.emplace_back(jobs[i]);
    job.x = call.reads(job.x, type, {batch, seq, job.heads, head_dim},
                       {job.batch_stride, job.position_stride, job.head_stride, 1});
    job.y = call.writes(job.y, type, {batch, seq, job.heads, head_dim});
  }
  RotateAngles viewed = angles;
  const std::vector<std::int64_t> sizes{angles.per_row ? batch : 1, seq, head_dim / 2};
  viewed.cos = call.reads(angles.cos, sizes);
  viewed.sin = call.reads(angles.sin, sizes);
  return call.launch<&GpuKernels::rotate>(batch, seq, head_dim, type, viewed, table, count);
}

const char* swiglu(void* stream, std::int64_t rows, std::int64_t hidden, Type type, const void* gate,
                   std::int64_t gate_stride, const void* up, std::int64_t up_stride, void* y) {
  KernelCall call(stream, "swiglu");
  return call.launch<&GpuKernels::swiglu>(rows, hidden, type, call.reads(gate, type, {rows, hidden}, {gate_stride, 1}),
                                          gate_stride, call.reads(up, type, {rows, hidden}, {up_stride, 1}), up_stride,
                                          call.writes(y, type, {rows, hidden}));
}

const char* swiglu_backward(void* stream, std::int64_t rows, std::int64_t hidden, Type type, const void* gate,
                            std::int64_t gate_stride, const void* up, std::int64_t up_stride, const void* dy,
                            void* dgate, std::int64_t dgate_stride, void* dup, std::int64_t dup_stride, void* y) {
  KernelCall call(stream, "swiglu_backward");
  return call.launch<&GpuKernels::swiglu_backward>(
      rows, hidden, type, call.reads(gate, type, {rows, hidden}, {gate_stride, 1}), gate_stride,
      call.reads(up, type, {rows, hidden}, {up_stride, 1}), up_stride, call.reads(dy, type, {rows, hidden}),
      call.writes(dgate, type, {rows, hidden}, {dgate_stride, 1}), dgate_stride,
      call.writes(dup, type, {rows, hidden}, {dup_stride, 1}), dup_stride, call.writes(y, type, {rows, hidden}));
}

const char* cross_entropy(void* stream, std::int64_t rows, std::int64_t vocab, std::int64_t row_stride, Type type,
                          void* logits, const std::int64_t* labels, float scale, float z_weight, float* loss) {
  KernelCall call(stream, "cross_entropy");
  call.reads(logits, type, {rows, vocab}, {row_stride, 1});
  void* const viewed = scale == 0 ? sim_backend().runtime.kernel_view(logits)
                                  : call.writes(logits, type, {rows, vocab}, {row_stride, 1});
  return call.launch<&GpuKernels::cross_entropy>(rows, vocab, row_stride, type, viewed, call.reads(labels, {rows}),
                                                 scale, z_weight, call.writes(loss, {rows}));
}

const char* adamw(void* stream, int count, const AdamWTensor* tensors, const AdamWSettings& settings) {
  KernelCall call(stream, "adamw");
  Table<AdamWTensor> table;
  for (int i = 0; i < count; ++i) {
    AdamWTensor& tensor = table.values.emplace_back(tensors[i]);
    tensor.parameter = call.updates(tensor.parameter, {tensor.count});
    tensor.grad = call.reads(tensor.grad, settings.grad_type, {tensor.count});
    tensor.exp_avg = call.updates(tensor.exp_avg, {tensor.count});
    tensor.exp_avg_sq = call.updates(tensor.exp_avg_sq, {tensor.count});
    tensor.copy = call.writes(tensor.copy, settings.copy_type, {tensor.count});
    tensor.step = call.reads(tensor.step, {1});
  }
  AdamWSettings viewed = settings;
  viewed.grad_scale = call.reads(settings.grad_scale, {1});
  viewed.skip = call.reads(settings.skip, {1});
  return call.launch<&GpuKernels::adamw>(count, table, viewed);
}

const char* increment(void* stream, int count, float* const* steps, const float* skip) {
  KernelCall call(stream, "increment");
  Table<float*> table;
  for (int i = 0; i < count; ++i) table.values.push_back(call.updates(steps[i], {1}));
  return call.launch<&GpuKernels::increment>(count, table, call.reads(skip, {1}));
}

const char* squares(void* stream, int count, const ConstTensor* tensors, Type type, double* partial) {
  KernelCall call(stream, "squares");
  Table<ConstTensor> table;
  for (int i = 0; i < count; ++i) {
    table.values.push_back({tensors[i].count, call.reads(tensors[i].values, type, {tensors[i].count})});
  }
  return call.launch<&GpuKernels::squares>(count, table, type, call.writes(partial, {squares_blocks(count, tensors)}));
}

const char* total(void* stream, std::int64_t count, const double* partial, double* total) {
  KernelCall call(stream, "total");
  return call.launch<&GpuKernels::total>(count, call.reads(partial, {count}), call.writes(total, {1}));
}

const char* float8_amax(void* stream, std::int64_t rows, std::int64_t columns, Type type, const void* x, bool via_bf16,
                        float* of_all, float* of_rows, float* of_columns) {
  KernelCall call(stream, "float8_amax");
  return call.launch<&GpuKernels::float8_amax>(rows, columns, type, call.reads(x, type, {rows, columns}), via_bf16,
                                               call.updates(of_all, {1}), call.updates(of_rows, {rows}),
                                               call.updates(of_columns, {columns}));
}

const char* float8_cast(void* stream, const Float8CastJob& job) {
  KernelCall call(stream, "float8_cast");
  Float8CastJob viewed = job;
  viewed.x = call.reads(job.x, job.type, {job.rows, job.columns});
  const auto target = [&](Float8Target& to, std::int64_t lines, std::int64_t length) {
    const std::int64_t scales = job.by_line ? lines : 1;
    if (to.values == nullptr) return;
    to.values = call.writes(static_cast<unsigned char*>(to.values), {lines, length});
    to.amax = call.reads(to.amax, {scales});
    to.inverse = call.writes(to.inverse, {scales});
  };
  target(viewed.plain, job.rows, job.columns);
  target(viewed.transposed, job.columns, (job.rows + 15) / 16 * 16);
  return call.launch<&GpuKernels::float8_cast>(viewed);
}

const char* uniform(void* stream, const UniformJob& job) {
  KernelCall call(stream, "uniform");
  UniformJob viewed = job;
  viewed.out = call.writes(job.out, {job.rows, job.columns});
  return call.launch<&GpuKernels::uniform>(viewed);
}

constexpr GpuKernels kSimKernels{
    "sim",       rms_norm,        add_rms_norm,  add,   rms_norm_backward, column_sums, rotate,
    swiglu,      swiglu_backward, cross_entropy, adamw, increment,         squares,     total,
    float8_amax, float8_cast,     uniform};

}  // namespace

void register_gpu_kernels(SimBackend& /*backend*/) {
  kernels::register_gpu_kernels(c10::DeviceType::PrivateUse1, &kSimKernels);
}

}  // namespace phalanx::sim_device
