// Phalanx's GPU kernels on a simulated device. Each kernel has the values of its host build, declares exactly the
// memory that it reads and writes, and is reported by its name where a stream does not wait. The differentiable
// functions over them have the bits of the CPU with the same kernels, and the host does not wait.
#include "phalanx/kernels/gpu/gpu_kernels.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/kernels/rms_norm.h"
#include "phalanx/kernels/rotary.h"
#include "phalanx/kernels/swiglu_feed_forward.h"
#include "phalanx/kernels/weight_product.h"
#include "phalanx/testing/sim_device/torch/out_dtype.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;
using kernels::gpu::GpuKernels;
using kernels::gpu::Type;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StrEq;
using Tensors = std::vector<at::Tensor>;

/// Numbers from 0.5 to 1.5 that do not repeat, in each tensor others.
at::Tensor some_values(std::int64_t count, at::ScalarType type, std::int64_t seed) {
  return at::arange(count, at::kDouble).mul(0.37).add(static_cast<double>(seed)).sin().mul(0.5).add(1.0).to(type);
}

struct Argument {
  at::Tensor tensor;
  bool is_written = false;
};

/// Makes a kernel's arguments on a device, each in the middle of a larger tensor.
class Arguments {
 public:
  explicit Arguments(c10::Device device) : device_(device) {}

  at::Tensor make(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
    const std::int64_t count = c10::multiply_integers(sizes);
    const auto seed = static_cast<std::int64_t>(whole.size());
    whole.push_back(some_values(count + 2 * kMargin, type, seed).to(device_));
    return whole.back().narrow(0, kMargin, count).view(sizes);
  }
  at::Tensor reads(const at::Tensor& tensor) { return add(tensor, false); }
  at::Tensor writes(const at::Tensor& tensor) { return add(tensor, true); }

  static constexpr std::int64_t kMargin = 64;  // elements
  Tensors whole;
  std::vector<Argument> all;

 private:
  const at::Tensor& add(const at::Tensor& tensor, bool is_written) {
    return all.emplace_back(Argument{tensor, is_written}).tensor;
  }
  c10::Device device_;
};

using Start = std::function<const char*(const GpuKernels& kernels, void* stream)>;

struct KernelCase {
  const char* name;
  std::function<Start(Arguments& arguments)> make;
};

float* floats(const at::Tensor& tensor) { return tensor.mutable_data_ptr<float>(); }
double* doubles(const at::Tensor& tensor) { return tensor.mutable_data_ptr<double>(); }
constexpr std::int64_t kRows = 6, kColumns = 40;

Start rms_norm(Arguments& a) {
  const auto x = a.reads(a.make({kRows, kColumns}, at::kBFloat16)), w = a.reads(a.make({kColumns}));
  const auto y = a.writes(a.make({kRows, kColumns}, at::kBFloat16)), inverse = a.writes(a.make({kRows}));
  return [=](const GpuKernels& kernels, void* stream) {
    return kernels.rms_norm(stream, kRows, kColumns, Type::bf16, x.const_data_ptr(), Type::f32, w.const_data_ptr(),
                            1e-5f, Type::bf16, y.mutable_data_ptr(), floats(inverse));
  };
}

Start add_rms_norm(Arguments& a) {
  const auto x = a.reads(a.make({kRows, kColumns})), delta = a.reads(a.make({kRows, kColumns}, at::kBFloat16));
  const auto w = a.reads(a.make({kColumns})), h = a.writes(a.make({kRows, kColumns}));
  const auto y = a.writes(a.make({kRows, kColumns}, at::kBFloat16)), inverse = a.writes(a.make({kRows}));
  return [=](const GpuKernels& kernels, void* stream) {
    return kernels.add_rms_norm(stream, kRows, kColumns, Type::f32, x.const_data_ptr(), Type::bf16,
                                delta.const_data_ptr(), h.mutable_data_ptr(), Type::f32, w.const_data_ptr(), 1e-5f,
                                Type::bf16, y.mutable_data_ptr(), floats(inverse));
  };
}

Start rms_norm_backward(Arguments& a) {
  const auto x = a.reads(a.make({kRows, kColumns})), w = a.reads(a.make({kColumns})),
             inverse = a.reads(a.make({kRows}));
  const auto dy = a.reads(a.make({kRows, kColumns}, at::kBFloat16)), dh = a.reads(a.make({kRows, kColumns}));
  const auto dx = a.writes(a.make({kRows, kColumns})), partial = a.writes(a.make({2, kColumns}));
  const auto copy = a.writes(a.make({kRows, kColumns}, at::kBFloat16));
  return [=](const GpuKernels& kernels, void* stream) {
    return kernels.rms_norm_backward(stream, kRows, kColumns, Type::f32, x.const_data_ptr(), Type::f32,
                                     w.const_data_ptr(), floats(inverse), Type::bf16, dy.const_data_ptr(),
                                     dh.const_data_ptr(), dx.mutable_data_ptr(), Type::bf16, copy.mutable_data_ptr(),
                                     floats(partial), 2);
  };
}

Start add(Arguments& a) {
  const auto x = a.reads(a.make({kRows, kColumns})), delta = a.reads(a.make({kRows, kColumns}, at::kBFloat16));
  const auto h = a.writes(a.make({kRows, kColumns}));
  return [=](const GpuKernels& kernels, void* stream) {
    return kernels.add(stream, kRows * kColumns, Type::f32, x.const_data_ptr(), Type::bf16, delta.const_data_ptr(),
                       h.mutable_data_ptr());
  };
}

Start column_sums(Arguments& a) {
  const auto partial = a.reads(a.make({3, kColumns})), out = a.writes(a.make({kColumns}, at::kHalf));
  return [=](const GpuKernels& kernels, void* stream) {
    return kernels.column_sums(stream, 3, kColumns, floats(partial), Type::f16, out.mutable_data_ptr());
  };
}

// The heads of queries and keys are columns of one tensor, as a fused projection makes them.
Start rotate(Arguments& a) {
  const at::Tensor projected = a.make({2, 5, 3, 8});
  const auto q = a.reads(projected.narrow(2, 0, 2)), k = a.reads(projected.narrow(2, 2, 1));
  const auto cos = a.reads(a.make({2, 5, 4})), sin = a.reads(a.make({2, 5, 4}));
  const auto turned_q = a.writes(a.make({2, 5, 2, 8})), turned_k = a.writes(a.make({2, 5, 1, 8}));
  return [=](const GpuKernels& kernels, void* stream) {
    const kernels::gpu::RotateJob jobs[] = {{floats(q), 5 * 3 * 8, 3 * 8, 8, 2, floats(turned_q)},
                                            {floats(k), 5 * 3 * 8, 3 * 8, 8, 1, floats(turned_k)}};
    return kernels.rotate(stream, 2, 5, 8, Type::f32, {floats(cos), floats(sin), true, -1.0f}, jobs, 2);
  };
}

Start swiglu(Arguments& a) {
  const at::Tensor gate_up = a.make({kRows, 2 * kColumns}, at::kHalf);
  const auto gate = a.reads(gate_up.narrow(1, 0, kColumns)), up = a.reads(gate_up.narrow(1, kColumns, kColumns));
  const auto y = a.writes(a.make({kRows, kColumns}, at::kHalf));
  return [=](const GpuKernels& kernels, void* stream) {
    return kernels.swiglu(stream, kRows, kColumns, Type::f16, gate.const_data_ptr(), 2 * kColumns, up.const_data_ptr(),
                          2 * kColumns, y.mutable_data_ptr());
  };
}

Start swiglu_backward(Arguments& a) {
  const at::Tensor gate_up = a.make({kRows, 2 * kColumns}), grads = a.make({kRows, 2 * kColumns});
  const auto gate = a.reads(gate_up.narrow(1, 0, kColumns)), up = a.reads(gate_up.narrow(1, kColumns, kColumns));
  const auto dgate = a.writes(grads.narrow(1, 0, kColumns)), dup = a.writes(grads.narrow(1, kColumns, kColumns));
  const auto dy = a.reads(a.make({kRows, kColumns})), y = a.writes(a.make({kRows, kColumns}));
  return [=](const GpuKernels& kernels, void* stream) {
    return kernels.swiglu_backward(stream, kRows, kColumns, Type::f32, floats(gate), 2 * kColumns, floats(up),
                                   2 * kColumns, floats(dy), floats(dgate), 2 * kColumns, floats(dup), 2 * kColumns,
                                   floats(y));
  };
}

KernelCase cross_entropy(const char* name, float scale) {
  return {name, [scale](Arguments& a) -> Start {
            const at::Tensor rows = a.make({kRows, kColumns + 1}, at::kBFloat16).narrow(1, 0, kColumns);
            const auto logits = scale == 0 ? a.reads(rows) : a.writes(rows);
            const auto labels = a.reads(a.make({kRows}, at::kLong)), loss = a.writes(a.make({kRows}));
            return [=](const GpuKernels& kernels, void* stream) {
              return kernels.cross_entropy(stream, kRows, kColumns, kColumns + 1, Type::bf16, logits.mutable_data_ptr(),
                                           labels.const_data_ptr<std::int64_t>(), scale, 0.0f, floats(loss));
            };
          }};
}

Start adamw(Arguments& a) {
  std::vector<kernels::gpu::AdamWTensor> table;
  for (const std::int64_t count : {7, 30}) {
    const auto parameter = a.writes(a.make({count})), first = a.writes(a.make({count})),
               second = a.writes(a.make({count}));
    const auto grad = a.reads(a.make({count}, at::kBFloat16)), copy = a.writes(a.make({count}, at::kBFloat16));
    table.push_back({count, floats(parameter), grad.const_data_ptr(), floats(first), floats(second),
                     copy.mutable_data_ptr(), floats(a.reads(a.make({1}).fill_(3)))});
  }
  const auto scale = a.reads(a.make({1})), skip = a.reads(a.make({1}).zero_());
  return [=](const GpuKernels& kernels, void* stream) {
    return kernels.adamw(stream, 2, table.data(),
                         {1e-3, 0.9, 0.95, 1e-8, 0.1, Type::bf16, Type::bf16, floats(scale), floats(skip)});
  };
}

Start increment(Arguments& a) {
  const auto one = a.writes(a.make({1})), other = a.writes(a.make({1})), skip = a.reads(a.make({1}).zero_());
  return [=](const GpuKernels& kernels, void* stream) {
    float* const steps[] = {floats(one), floats(other)};
    return kernels.increment(stream, 2, steps, floats(skip));
  };
}

Start squares(Arguments& a) {
  const auto one = a.reads(a.make({70'000}, at::kBFloat16)), other = a.reads(a.make({5}, at::kBFloat16));
  const auto partial = a.writes(a.make({3}, at::kDouble));
  return [=](const GpuKernels& kernels, void* stream) {
    const kernels::gpu::ConstTensor table[] = {{one.numel(), one.const_data_ptr()},
                                               {other.numel(), other.const_data_ptr()}};
    return kernels.squares(stream, 2, table, Type::bf16, doubles(partial));
  };
}

Start total(Arguments& a) {
  const auto partial = a.reads(a.make({9}, at::kDouble)), sum = a.writes(a.make({1}, at::kDouble));
  return
      [=](const GpuKernels& kernels, void* stream) { return kernels.total(stream, 9, doubles(partial), doubles(sum)); };
}

class SimGpuKernel : public SimTest, public ::testing::WithParamInterface<KernelCase> {
 protected:
  // The reports of a kernel on the side stream, with work on the default stream before or after it, and no wait.
  template <class Before, class After>
  std::vector<std::string> races_of(const Start& start, Before&& before, After&& after) {
    sim.runtime.synchronize_device(0, "before a kernel");
    before();
    EXPECT_EQ(start(*on_sim_, side.native_handle()), nullptr);
    after();
    sim.runtime.synchronize_device(0, "after a kernel");
    return take_races();
  }
  static auto nothing() {
    return [] {};
  }
  std::string quoted_name() const {
    const std::string name = GetParam().name;
    return "'" + name.substr(0, name.find('/')) + "'";
  }

  const c10::impl::VirtualGuardImpl guard{at::kPrivateUse1};
  const c10::Stream side = guard.getStreamFromGlobalPool(device, false);
  const GpuKernels* on_sim_ = kernels::gpu_kernels_on(at::kPrivateUse1);
};

TEST_P(SimGpuKernel, HasTheValuesOfTheHostBuild) {
  Arguments on_cpu(at::kCPU), on_device(device);
  const Start of_cpu = GetParam().make(on_cpu), of_device = GetParam().make(on_device);
  ASSERT_EQ(of_cpu(kernels::gpu::host_kernels(), nullptr), nullptr);
  ASSERT_EQ(of_device(*on_sim_, nullptr), nullptr);
  EXPECT_EQ(sim.runtime.launches_by_kernel().count(quoted_name().substr(1, quoted_name().size() - 2)), 1);
  for (std::size_t i = 0; i < on_cpu.whole.size(); ++i) {
    EXPECT_TRUE(at::equal(on_device.whole[i].cpu(), on_cpu.whole[i])) << "argument " << i;
  }
}

TEST_P(SimGpuKernel, ADroppedWaitIsReportedForEachArgument) {
  Arguments arguments(device);
  const Start start = GetParam().make(arguments);
  for (std::size_t i = 0; i < arguments.all.size(); ++i) {
    SCOPED_TRACE(i);
    const auto& [tensor, is_written] = arguments.all[i];
    const auto write = [&] { tensor.mul(1.0), tensor.add_(0); };
    const auto read = [&] { const at::Tensor used = tensor.to(at::kDouble).add(1.0); };
    EXPECT_THAT(races_of(start, write, nothing()), Contains(HasSubstr(quoted_name())));
    EXPECT_THAT(races_of(start, nothing(), write), Contains(HasSubstr(quoted_name())));
    const auto with_read = races_of(start, nothing(), read);
    EXPECT_EQ(with_read.empty(), !is_written) << ::testing::PrintToString(with_read);
  }
}

TEST_P(SimGpuKernel, TouchesNothingElse) {
  Arguments arguments(device);
  const Start start = GetParam().make(arguments);
  const auto write_around = [&] {
    for (const at::Tensor& whole : arguments.whole) {
      whole.narrow(0, 0, Arguments::kMargin).add_(1);
      whole.narrow(0, whole.size(0) - Arguments::kMargin, Arguments::kMargin).add_(1);
    }
  };
  EXPECT_THAT(races_of(start, write_around, write_around), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Kernels, SimGpuKernel,
                         ::testing::Values(KernelCase{"rms_norm", rms_norm}, KernelCase{"add_rms_norm", add_rms_norm},
                                           KernelCase{"add", add}, KernelCase{"rms_norm_backward", rms_norm_backward},
                                           KernelCase{"column_sums", column_sums}, KernelCase{"rotate", rotate},
                                           KernelCase{"swiglu", swiglu}, KernelCase{"swiglu_backward", swiglu_backward},
                                           cross_entropy("cross_entropy", 0.25f),
                                           cross_entropy("cross_entropy/loss_only", 0.0f), KernelCase{"adamw", adamw},
                                           KernelCase{"increment", increment}, KernelCase{"squares", squares},
                                           KernelCase{"total", total}),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::ranges::replace(name, '/', '_');
                           return name;
                         });

// --- refusals --------------------------------------------------------------------------------------------------------

class SimGpuKernelRefusals : public SimTest {
 protected:
  const char* total_of(void* stream, const at::Tensor& partial, const at::Tensor& sum, std::int64_t count = 4) {
    return kernels::gpu_kernels_on(at::kPrivateUse1)->total(stream, count, doubles(partial), doubles(sum));
  }
  at::Tensor numbers(std::int64_t count, int index = 0) { return at::ones({count}, on_sim(index).dtype(at::kDouble)); }
};

TEST_F(SimGpuKernelRefusals, MemoryOfTheHostOrOfAnotherDevice) {
  const at::Tensor on_host = at::ones({4}, at::kDouble);
  EXPECT_THAT(total_of(nullptr, on_host, numbers(1)), StrEq("an argument is not in this device's memory"));
  EXPECT_THAT(total_of(nullptr, numbers(4, 1), numbers(1)), StrEq("an argument is not in this device's memory"));
  EXPECT_EQ(total_of(nullptr, numbers(4), numbers(1)), nullptr);
}

TEST_F(SimGpuKernelRefusals, AStreamOfAnotherDevice) {
  const c10::impl::VirtualGuardImpl guard(at::kPrivateUse1);
  const c10::Stream other = guard.getDefaultStream(sim_device::SimBackend::device(1));
  EXPECT_THAT(total_of(other.native_handle(), numbers(4, 1), numbers(1, 1)),
              StrEq("the stream is not of the current device"));
}

TEST_F(SimGpuKernelRefusals, WhatTheKernelsRefuseThemselves) {
  EXPECT_THAT(total_of(nullptr, numbers(4), numbers(1), -1), StrEq("total: count is negative"));
}

// --- differentiable functions ----------------------------------------------------------------------------------------

struct Precision {
  const char* name;
  at::ScalarType inputs;
  std::optional<at::ScalarType> autocast;
};

class SimGpuFunctions : public SimTest, public ::testing::WithParamInterface<Precision> {
 protected:
  using Function = std::function<at::Tensor(const Tensors& inputs)>;

  /// The result and the gradients of all inputs, on the CPU.
  Tensors run(c10::Device where, const Function& function, const std::vector<std::vector<std::int64_t>>& shapes) {
    Tensors inputs, found;
    for (const auto& shape : shapes) {
      const auto seed = static_cast<std::int64_t>(inputs.size());
      const at::Tensor values = some_values(c10::multiply_integers(shape), GetParam().inputs, seed).view(shape) - 0.9;
      inputs.push_back(values.to(where).requires_grad_());
    }
    const std::uint64_t waits_before = waits();
    {
      const kernels::AutocastScope autocast(where.type(), {.enabled = GetParam().autocast.has_value(),
                                                           .dtype = GetParam().autocast.value_or(at::kBFloat16)});
      found.push_back(function(inputs));
    }
    found.front().to(at::kFloat).square().sum().backward();
    EXPECT_EQ(waits(), waits_before);
    for (at::Tensor& input : inputs) found.push_back(input.grad());
    for (at::Tensor& one : found) one = one.detach().cpu();
    return found;
  }

  void expect_bits_of_the_cpu(const Function& function, const std::vector<std::vector<std::int64_t>>& shapes,
                              const std::vector<std::string>& names) {
    Tensors expected;
    {
      const kernels::HostGpuKernels on_cpu;
      const auto out_dtype = sim_device::register_out_dtype_on_cpu();
      expected = run(at::kCPU, function, shapes);
    }
    sim.runtime.set_delays({.longest = 100us, .seed = 2});
    const Tensors found = run(device, function, shapes);
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].scalar_type(), expected[i].scalar_type()) << i;
      EXPECT_TRUE(at::equal(found[i], expected[i])) << "result or gradient " << i;
    }
    for (const std::string& name : names) EXPECT_EQ(sim.runtime.launches_by_kernel()[name], 1) << name;
  }
};

TEST_P(SimGpuFunctions, RmsNorm) {
  expect_bits_of_the_cpu([](const Tensors& in) { return kernels::rms_norm(in[0], in[1], 1e-5); }, {{3, 37, 24}, {24}},
                         {"rms_norm", "rms_norm_backward", "column_sums"});
}

TEST_P(SimGpuFunctions, Rotary) {
  const at::Tensor angles = some_values(7 * 4, at::kFloat, 9).view({7, 4});
  const at::Tensor tables[2][2] = {{angles.cos(), angles.sin()}, {angles.cos().to(device), angles.sin().to(device)}};
  expect_bits_of_the_cpu(
      [&](const Tensors& in) {
        const auto& [cos, sin] = tables[in[0].is_cpu() ? 0 : 1];
        const auto [q, k] = kernels::apply_rotary(in[0].transpose(1, 2), in[1].transpose(1, 2), cos, sin);
        return (q * q).sum() + k.sum();
      },
      {{2, 7, 4, 8}, {2, 7, 2, 8}}, {});
  EXPECT_EQ(sim.runtime.launches_by_kernel()["rotate"], 2);
}

TEST_P(SimGpuFunctions, FeedForward) {
  expect_bits_of_the_cpu([](const Tensors& in) { return kernels::swiglu_feed_forward(in[0], in[1], in[2], in[3]); },
                         {{2, 9, 16}, {24, 16}, {16, 24}, {24, 16}}, {"swiglu", "swiglu_backward"});
}

TEST_P(SimGpuFunctions, Linear) {
  expect_bits_of_the_cpu([](const Tensors& in) { return kernels::linear(in[0], in[1], in[2]); },
                         {{40, 16}, {24, 16}, {24}}, {});
}

TEST_P(SimGpuFunctions, LinearCrossEntropy) {
  expect_bits_of_the_cpu(
      [](const Tensors& in) {
        const at::Tensor labels = at::arange(40, at::TensorOptions(at::kLong).device(in[0].device()));
        return kernels::linear_cross_entropy(in[0], in[1], labels);
      },
      {{40, 16}, {50, 16}}, {"cross_entropy"});
}

// Under autocast the gradient of a float32 weight is a sum in float32.
TEST_P(SimGpuFunctions, WeightGradientsOfWideWeightsAreSumsInFloat32) {
  expect_bits_of_the_cpu([](const Tensors& in) { return kernels::linear(in[0], in[1], {}); }, {{40, 16}, {24, 16}}, {});
  EXPECT_EQ(sim.runtime.launches_by_kernel().contains("aten::mm.dtype_out"), GetParam().autocast.has_value());
}

INSTANTIATE_TEST_SUITE_P(Precisions, SimGpuFunctions,
                         ::testing::Values(Precision{"float32", at::kFloat, {}},
                                           Precision{"bfloat16", at::kBFloat16, {}},
                                           Precision{"float16", at::kHalf, {}},
                                           Precision{"autocast_bfloat16", at::kFloat, at::kBFloat16},
                                           Precision{"autocast_float16", at::kFloat, at::kHalf}),
                         [](const auto& info) { return info.param.name; });

// The gradient of the sum of the losses would not fit float16.
TEST(OutDtype, TheHeadsGradientOfAFrequentTokenFitsFloat16) {
  const auto out_dtype = sim_device::register_out_dtype_on_cpu();
  const kernels::HostGpuKernels host_kernels;
  constexpr std::int64_t kRows = 4096;
  const at::Tensor x = at::full({kRows, 4}, 50.0, at::kHalf).requires_grad_();
  const at::Tensor weight = at::zeros({8, 4}, at::kHalf).requires_grad_();
  kernels::linear_cross_entropy(x, weight, at::full({kRows}, 3, at::kLong)).backward();
  EXPECT_NEAR(weight.grad()[3][0].item<double>(), -50.0 * 7 / 8, 0.1);
}

TEST(OutDtype, IsOnDevicesAndOnTheCpuOnlyWhileRegistered) {
  sim_device::sim_backend();
  EXPECT_TRUE(kernels::has_out_dtype(at::kPrivateUse1));
  EXPECT_FALSE(kernels::has_out_dtype(at::kCPU));
  const auto registered = sim_device::register_out_dtype_on_cpu();
  EXPECT_TRUE(kernels::has_out_dtype(at::kCPU));
}

}  // namespace
}  // namespace phalanx
