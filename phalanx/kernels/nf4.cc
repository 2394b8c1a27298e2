#include "phalanx/kernels/nf4.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "phalanx/base/assert.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/wide_rows.h"

namespace phalanx::kernels {
namespace {

constexpr std::size_t kValues = 16, kScales = 256;
constexpr std::int64_t kNf4Grain = 512;  // minimum blocks per thread
constexpr float kSmallestScale = 1e-38F;

// Quantiles of a normal distribution, so that each is about equally frequent, with an exact zero: appendix E of the
// paper. The digits are those of bitsandbytes.
constexpr std::array<float, kValues> kNf4Values = {-1.0F,
                                                   -0.6961928009986877F,
                                                   -0.5250730514526367F,
                                                   -0.39491748809814453F,
                                                   -0.28444138169288635F,
                                                   -0.18477343022823334F,
                                                   -0.09105003625154495F,
                                                   0.0F,
                                                   0.07958029955625534F,
                                                   0.16093020141124725F,
                                                   0.24611230194568634F,
                                                   0.33791524171829224F,
                                                   0.44070982933044434F,
                                                   0.5626170039176941F,
                                                   0.7229568362236023F,
                                                   1.0F};

/// The 8-bit numbers of dynamic exponent and fraction (arXiv:1511.04561) in which scales are stored, ascending.
/// Computed as bitsandbytes computes them, in fp32.
std::array<float, kScales> dynamic_map() {
  constexpr int kExponents = 7;
  std::vector<float> values = {0.0F, 1.0F};
  for (int i = 0; i < kExponents; ++i) {
    const at::Tensor bounds = at::linspace(0.1, 1.0, (std::int64_t{1} << i) + 1, at::TensorOptions(at::kFloat));
    const float* bound = bounds.const_data_ptr<float>();
    const auto unit = static_cast<float>(std::pow(10.0, i - (kExponents - 1)));
    for (std::int64_t k = 0; k + 1 < bounds.numel(); ++k) {
      const float mean = (bound[k] + bound[k + 1]) / 2.0F;
      values.push_back(unit * mean);
      values.push_back(-unit * mean);
    }
  }
  std::array<float, kScales> sorted{};
  PHALANX_ASSERT(values.size() == kScales, "the map has a number for each byte");
  std::ranges::sort(values);
  std::ranges::copy(values, sorted.begin());
  return sorted;
}

template <std::size_t N>
std::array<float, N - 1> midpoints(const std::array<float, N>& values) {
  std::array<float, N - 1> result{};
  for (std::size_t i = 0; i + 1 < N; ++i) result[i] = (values[i] + values[i + 1]) / 2.0F;
  return result;
}

template <std::size_t N>
std::uint8_t nearest_code(const std::array<float, N>& bounds, float value) {
  return static_cast<std::uint8_t>(std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin());
}

float largest_magnitude(const float* values, std::int64_t count) {
  float largest = 0.0F;
  for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(values[i]));
  return largest;
}

float in_units(float value, float inverse) { return std::clamp(value * inverse, -1.0F, 1.0F); }

/// The floats whose bytes these are, at an address that suits them.
at::Tensor floats_of(const at::Tensor& bytes) { return bytes.clone().view(at::kFloat); }

/// Some rows of a weight.
struct Nf4Rows {
  Nf4Weight weight;
  Nf4Part part;
};

Nf4Rows rows_of(const Nf4Weight& weight, const Nf4Part& part, std::int64_t first, std::int64_t count) {
  Nf4Part rows = part;
  rows.first_row += first;
  return {{weight.codes.narrow(0, first, count), weight.absmax.narrow(0, first, count), weight.nested, weight.tables},
          rows};
}

void dequantise_on_host(const Nf4Weight& weight, const Nf4Part& part, float* out) {
  const at::Tensor codes = weight.codes.contiguous(), absmax = weight.absmax.contiguous();
  const at::Tensor nested = floats_of(weight.nested);
  const std::int64_t blocks = absmax.size(1), blocks_of_row = part.columns / kNf4Block;
  const std::uint8_t *code = codes.const_data_ptr<std::uint8_t>(), *scale_code = absmax.const_data_ptr<std::uint8_t>();
  const float *nested_scale = nested.const_data_ptr<float>(), *scales = weight.tables->scales.const_data_ptr<float>();
  const float offset = nested_scale[nested.numel() - 1];
  at::parallel_for(0, absmax.numel(), kNf4Grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t row = block / blocks, column = block % blocks;
      const std::int64_t number =
          (part.first_row + row) * blocks_of_row + part.first_column / kNf4Block + column;  // in the whole matrix
      const float scale = scales[scale_code[block]] * nested_scale[number / kNf4NestedBlock] + offset;
      std::array<float, kValues> values{};
      for (std::size_t i = 0; i < kValues; ++i) values[i] = kNf4Values[i] * scale;
      const std::uint8_t* const packed = code + block * (kNf4Block / 2);
      float* const element = out + block * kNf4Block;
      for (std::int64_t i = 0; i < kNf4Block / 2; ++i) {
        element[2 * i] = values[packed[i] >> 4U];
        element[2 * i + 1] = values[packed[i] & 15U];
      }
    }
  });
}

at::Tensor dequantise_on_device(const Nf4Weight& weight, const Nf4Part& part) {
  const std::int64_t rows = weight.absmax.size(0), blocks = weight.absmax.size(1);
  const auto whole_numbers = at::TensorOptions(at::kLong).device(weight.codes.device());
  const at::Tensor row = at::arange(rows, whole_numbers).add_(part.first_row).mul_(part.columns / kNf4Block);
  const at::Tensor column = at::arange(blocks, whole_numbers).add_(part.first_column / kNf4Block);
  const at::Tensor number = (row.unsqueeze(1) + column).div_(kNf4NestedBlock, "floor").flatten();
  const at::Tensor nested = floats_of(weight.nested);
  const at::Tensor of_scales = weight.tables->scales.index_select(0, weight.absmax.flatten().to(at::kInt));
  const at::Tensor scales =
      of_scales.mul(nested.index_select(0, number)).add_(nested[nested.numel() - 1]);  // [rows * blocks]
  const at::Tensor codes =
      at::stack({weight.codes.bitwise_right_shift(4), weight.codes.bitwise_and(15)}, -1).flatten().to(at::kInt);
  return weight.tables->values.index_select(0, codes).view({-1, kNf4Block}).mul_(scales.unsqueeze(1));
}

NarrowMatrix narrow_matrix(const Nf4Weight& weight, const Nf4Part& part) {
  return {.rows = weight.codes.size(0),
          .columns = 2 * weight.codes.size(1),
          .widen = [&](std::int64_t first, const at::Tensor& wide) {
            const Nf4Rows rows = rows_of(weight, part, first, wide.size(0));
            dequantise_on_host(rows.weight, rows.part, wide.mutable_data_ptr<float>());
          }};
}

struct Nf4LinearFunction : torch::autograd::Function<Nf4LinearFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const Nf4Weight& weight,
                            const Nf4Part& part, const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({weight.codes, weight.absmax, weight.nested, weight.tables->values, weight.tables->scales});
    ctx->saved_data["part"] = std::vector<std::int64_t>{part.first_row, part.first_column, part.columns};
    const auto used_bias = bias ? std::optional(bias->to(x.scalar_type())) : std::nullopt;
    return computed_once(SavedOp::linear, [&] {
      if (widens_by_rows(x)) {
        return std::vector{product_by_rows(x, narrow_matrix(weight, part), used_bias.value_or(at::Tensor()))};
      }
      return std::vector{at::linear(x, dequantise_nf4(weight, part, x.scalar_type()), used_bias)};
    })[0];
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto part = ctx->saved_data["part"].toIntVector();
    at::Tensor dx;
    if (ctx->needs_input_grad(0)) {
      const Nf4Weight weight{saved[0], saved[1], saved[2],
                             std::make_shared<const Nf4Tables>(Nf4Tables{saved[3], saved[4]})};
      const Nf4Part saved_part{part[0], part[1], part[2]};
      dx = widens_by_rows(grads[0]) && !at::GradMode::is_enabled()
               ? input_gradient_by_rows(grads[0], narrow_matrix(weight, saved_part))
               : at::matmul(grads[0], dequantise_nf4(weight, saved_part, grads[0].scalar_type()));
    }
    return {dx, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::shared_ptr<const Nf4Tables> Nf4Tables::make(at::Device device) {
  const std::array<float, kScales> scales = dynamic_map();
  return std::make_shared<const Nf4Tables>(
      Nf4Tables{.values = at::tensor(at::ArrayRef<float>(kNf4Values.data(), kValues)).to(device),
                .scales = at::tensor(at::ArrayRef<float>(scales.data(), kScales)).to(device)});
}

Nf4Weight quantise_nf4(const at::Tensor& weight_in, std::shared_ptr<const Nf4Tables> tables) {
  const at::NoGradGuard no_grad;
  const std::int64_t rows = weight_in.size(0), columns = weight_in.size(1);
  PHALANX_ASSERT(columns % kNf4Block == 0, "blocks do not cross rows");
  const at::Tensor weight = weight_in.detach().to(at::kCPU, at::kFloat).contiguous();
  const at::TensorOptions bytes = at::TensorOptions(at::kByte);
  const std::int64_t blocks = weight.numel() / kNf4Block;
  const at::Tensor codes = at::empty({rows, columns / 2}, bytes),
                   absmax = at::empty({rows, columns / kNf4Block}, bytes);
  const at::Tensor nested = at::empty({nf4_nested_bytes(weight.numel())}, bytes);
  const float* const values = weight.const_data_ptr<float>();
  auto* const code = codes.mutable_data_ptr<std::uint8_t>();
  std::vector<float> scales(static_cast<std::size_t>(blocks));
  const auto bounds = midpoints(kNf4Values);
  at::parallel_for(0, blocks, kNf4Grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const float* const element = values + block * kNf4Block;
      const float scale = largest_magnitude(element, kNf4Block), inverse = 1.0F / std::max(scale, kSmallestScale);
      scales[static_cast<std::size_t>(block)] = scale;
      for (std::int64_t i = 0; i < kNf4Block / 2; ++i) {
        const std::uint8_t high = nearest_code(bounds, in_units(element[2 * i], inverse)),
                           low = nearest_code(bounds, in_units(element[2 * i + 1], inverse));
        code[block * (kNf4Block / 2) + i] = static_cast<std::uint8_t>(high << 4U | low);
      }
    }
  });
  // In one order, so that the number of threads does not matter.
  double sum = 0.0;
  for (const float scale : scales) sum += static_cast<double>(scale);
  const auto offset = static_cast<float>(sum / static_cast<double>(std::max<std::int64_t>(blocks, 1)));
  for (float& scale : scales) scale -= offset;
  const at::Tensor nested_floats =
      at::empty({nested.numel() / static_cast<std::int64_t>(sizeof(float))}, at::TensorOptions(at::kFloat));
  float* const nested_scale = nested_floats.mutable_data_ptr<float>();
  auto* const scale_code = absmax.mutable_data_ptr<std::uint8_t>();
  const std::array<float, kScales> map = dynamic_map();
  const auto scale_bounds = midpoints(map);
  for (std::int64_t first = 0, number = 0; first < blocks; first += kNf4NestedBlock, ++number) {
    const std::int64_t count = std::min(kNf4NestedBlock, blocks - first);
    const float largest = largest_magnitude(scales.data() + first, count);
    nested_scale[number] = largest;
    const float inverse = 1.0F / std::max(largest, kSmallestScale);
    for (std::int64_t i = first; i < first + count; ++i) {
      scale_code[i] = nearest_code(scale_bounds, in_units(scales[static_cast<std::size_t>(i)], inverse));
    }
  }
  nested_scale[nested_floats.numel() - 1] = offset;
  nested.copy_(nested_floats.view(at::kByte));
  const at::Device device = tables->values.device();
  return {codes.to(device), absmax.to(device), nested.to(device), std::move(tables)};
}

at::Tensor dequantise_nf4(const Nf4Weight& weight, const Nf4Part& part, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const std::int64_t rows = weight.codes.size(0), columns = 2 * weight.codes.size(1);
  if (!weight.codes.device().is_cpu()) return dequantise_on_device(weight, part).view({rows, columns}).to(dtype);
  const at::Tensor wide = at::empty({rows, columns}, at::TensorOptions(at::kFloat));
  dequantise_on_host(weight, part, wide.mutable_data_ptr<float>());
  return wide.to(dtype);
}

at::Tensor nf4_linear(const at::Tensor& x, const Nf4Weight& weight, const Nf4Part& part, const at::Tensor& bias) {
  return Nf4LinearFunction::apply(in_autocast_type(x), weight, part,
                                  bias.defined() ? std::optional(bias) : std::nullopt);
}

}  // namespace phalanx::kernels
