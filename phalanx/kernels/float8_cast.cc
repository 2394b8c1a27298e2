#include "phalanx/kernels/float8_cast.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <compare>
#include <cstdint>
#include <mutex>
#include <set>
#include <string_view>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/gpu_launch.h"

namespace phalanx::kernels {
namespace {

constexpr double kLeastAmax = 1e-12;       // so that zeros have a scale
constexpr int kExponentBits = 0x7f800000;  // of a float
constexpr std::int64_t kMultiple = 16;     // of sizes of factors

double largest(at::ScalarType type) { return type == at::kFloat8_e5m2 ? 57344.0 : 448.0; }

std::int64_t padded(std::int64_t size) { return (size + kMultiple - 1) / kMultiple * kMultiple; }

/// Float bits of numbers that are not negative are in the numbers' order, and a NaN is the largest.
void take_max_over_ranks(const at::Tensor& amax, const Float8CastOptions& options) {
  if (options.max_over_ranks == nullptr || !*options.max_over_ranks)
    throw Error("cast_to_float8: a matrix that is cut needs max_over_ranks");
  (*options.max_over_ranks)(amax.view(at::kInt));
}

/// Of the whole matrix, [1, 1]; by row, [rows, 1]; by column, [1, columns].
at::Tensor amax_of(const at::Tensor& matrix, at::IntArrayRef over, bool is_cut, const Float8CastOptions& options) {
  // A NaN may come out with a sign.
  at::Tensor amax = at::amax(matrix.abs(), over, /*keepdim=*/true).to(at::kFloat).abs().contiguous();
  if (is_cut) take_max_over_ranks(amax, options);
  return amax;
}

at::Tensor scale_of(const at::Tensor& amax, const Float8CastOptions& options) {
  at::Tensor scale = (largest(options.to) / amax.to(at::kDouble).clamp_min(kLeastAmax)).to(at::kFloat);
  if (options.recipe == Float8Recipe::tensorwise) return scale;
  // The difference is 0, or NaN.
  return scale.view(at::kInt).bitwise_and(kExponentBits).view(at::kFloat) + (scale - scale);
}

at::Tensor cast(const at::Tensor& matrix, const at::Tensor& scale, at::ScalarType to) {
  return (matrix.to(at::kFloat) * scale).clamp(-largest(to), largest(to)).to(to);
}

at::Tensor transposed(const at::Tensor& values) {
  const std::int64_t rows = values.size(0), all = padded(rows);
  at::Tensor result = at::empty({values.size(1), all}, values.options());
  // As bytes, which every device can copy and fill.
  const at::Tensor bytes = result.view(at::kByte);
  bytes.narrow(1, 0, rows).copy_(values.view(at::kByte).t());
  if (all > rows) bytes.narrow(1, rows, all - rows).zero_();
  return result;
}

Float8Cast cast_by_operators(const at::Tensor& given, const Float8CastOptions& options) {
  const at::Tensor matrix = given.scalar_type() == at::kFloat ? given.to(options.through) : given;
  Float8Cast result;
  if (options.recipe == Float8Recipe::tensorwise) {
    result.amax =
        options.amax.defined() ? options.amax : amax_of(matrix, {0, 1}, options.cut != Float8Cut::none, options);
    const at::Tensor scale = scale_of(result.amax, options), inverse = scale.reciprocal();
    const at::Tensor values = cast(matrix, scale, options.to);
    if (options.plain) result.plain = {values, inverse};
    if (options.transposed) result.transposed = {transposed(values), inverse};
    return result;
  }
  if (options.plain) {
    const at::Tensor scale = scale_of(amax_of(matrix, {1}, options.cut == Float8Cut::columns, options), options);
    result.plain = {cast(matrix, scale, options.to), scale.reciprocal()};
  }
  if (options.transposed) {
    const at::Tensor scale = scale_of(amax_of(matrix, {0}, options.cut == Float8Cut::rows, options), options);
    result.transposed = {transposed(cast(matrix, scale, options.to)), scale.reciprocal().view({-1, 1})};
  }
  return result;
}

bool is_at_multiple_of_16(const at::Tensor& x) {
  return x.is_contiguous() && reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

bool fits_kernels(const at::Tensor& matrix, const Float8CastOptions& options) {
  const bool is_rounded = matrix.scalar_type() == at::kFloat && options.through != at::kFloat;
  return is_at_multiple_of_16(matrix) && matrix.size(1) % kMultiple == 0 &&
         (!is_rounded || options.through == at::kBFloat16);
}

/// The same numbers, by our own kernels: one for the largest values, and one for both casts.
Float8Cast cast_by_kernels(const GpuLaunch& launch, const at::Tensor& matrix, const Float8CastOptions& options) {
  const std::int64_t rows = matrix.size(0), columns = matrix.size(1);
  const at::TensorOptions floats = matrix.options().dtype(at::kFloat).requires_grad(false);
  const bool by_line = options.recipe == Float8Recipe::rowwise;
  gpu::Float8CastJob job{.rows = rows,
                         .columns = columns,
                         .type = gpu_type(matrix.scalar_type()),
                         .x = matrix.const_data_ptr(),
                         .via_bf16 = matrix.scalar_type() == at::kFloat && options.through == at::kBFloat16,
                         .to = options.to == at::kFloat8_e5m2 ? gpu::Float8Type::e5m2 : gpu::Float8Type::e4m3,
                         .by_line = by_line,
                         .plain = {},
                         .transposed = {}};
  const auto find = [&](const at::Tensor& all, const at::Tensor& of_rows, const at::Tensor& of_columns) {
    const auto pointer = [](const at::Tensor& t) { return t.defined() ? t.mutable_data_ptr<float>() : nullptr; };
    launch.check("float8_amax",
                 launch.kernels().float8_amax(launch.stream(), rows, columns, job.type, job.x, job.via_bf16,
                                              pointer(all), pointer(of_rows), pointer(of_columns)));
  };
  Float8Cast result;
  at::Tensor of_rows, of_columns;
  if (by_line) {
    const at::Tensor lines = at::zeros({(options.plain ? rows : 0) + (options.transposed ? columns : 0)}, floats);
    if (options.plain) of_rows = lines.narrow(0, 0, rows);
    if (options.transposed) of_columns = lines.narrow(0, lines.size(0) - columns, columns);
    find({}, of_rows, of_columns);
    if (of_rows.defined() && options.cut == Float8Cut::columns) take_max_over_ranks(of_rows, options);
    if (of_columns.defined() && options.cut == Float8Cut::rows) take_max_over_ranks(of_columns, options);
  } else {
    result.amax = options.amax;
    if (!result.amax.defined()) {
      result.amax = at::zeros({1, 1}, floats);
      find(result.amax, {}, {});
      if (options.cut != Float8Cut::none) take_max_over_ranks(result.amax, options);
    }
    of_rows = of_columns = result.amax;
  }
  const auto target = [&](Float8Matrix& made, std::int64_t lines, std::int64_t length, const at::Tensor& amax) {
    made = {at::empty({lines, length}, floats.dtype(options.to)), at::empty({by_line ? lines : 1, 1}, floats)};
    return gpu::Float8Target{made.values.mutable_data_ptr(), amax.const_data_ptr<float>(),
                             made.inverse.mutable_data_ptr<float>()};
  };
  if (options.plain) job.plain = target(result.plain, rows, columns, of_rows);
  if (options.transposed) job.transposed = target(result.transposed, columns, padded(rows), of_columns);
  launch.check("float8_cast", launch.kernels().float8_cast(launch.stream(), job));
  return result;
}

/// Of a product of [rows, inner] and [inner, columns].
struct ProductShape {
  bool by_row;
  std::int64_t rows, columns, inner;
  // NOLINTNEXTLINE(modernize-use-nullptr): takes the 0 that the generated comparison holds for a pointer
  auto operator<=>(const ProductShape&) const = default;
};

/// product(float32), or, where the library has none of such shapes, product(bfloat16), which is said once. It is
/// decided for each shape by itself, so that no product depends on those before it.
template <class Product>
at::Tensor float32_or_bfloat16(const ProductShape& shape, Product product) {
  static std::mutex mutex;
  static std::set<ProductShape> lacking;
  const auto is_lacking = [&] {
    const std::lock_guard lock(mutex);
    return lacking.contains(shape);
  };
  if (is_lacking()) return product(at::kBFloat16);
  try {
    return product(at::kFloat);
  } catch (const c10::Error& error) {
    const std::string_view text = error.what_without_backtrace();
    if (text.find("NOT_SUPPORTED") == text.npos && text.find("supported") == text.npos) throw;
  }
  {
    const std::lock_guard lock(mutex);
    lacking.insert(shape);
  }
  log::warn_once(fmt::format(
      "float8: libtorch has no {} product of float8 numbers of {} x {} and {} x {} in float32 here: gradients of such "
      "weights are rounded to bfloat16 before they are added up",
      shape.by_row ? "rowwise" : "tensorwise", shape.rows, shape.inner, shape.inner, shape.columns));
  return product(at::kBFloat16);
}

}  // namespace

Float8Cast cast_to_float8(const at::Tensor& matrix, const Float8CastOptions& options) {
  if (fits_kernels(matrix, options)) {
    if (const auto launch = gpu_launch(matrix)) return cast_by_kernels(*launch, matrix, options);
  }
  return cast_by_operators(matrix, options);
}

at::Tensor float8_product(const Float8Matrix& a, const Float8Matrix& b, const Float8ProductOptions& options) {
  const at::Tensor scale_b = b.inverse.view({1, -1});
  at::Tensor out = options.out;
  if (a.values.device().is_cpu() || options.emulate) {
    const AutocastScope exact(a.values.device().type(), {.enabled = false});
    at::Tensor made = at::mm(a.values.to(at::kFloat), b.values.to(at::kFloat).t());
    made.mul_(a.inverse).mul_(scale_b);
    return out.defined() ? out.copy_(made) : made.to(options.dtype);
  }
  const at::ScalarType dtype = out.defined() ? out.scalar_type() : options.dtype;
  const auto product_in = [&](at::ScalarType type) {
    at::Tensor made = out.defined() && type == dtype && is_at_multiple_of_16(out)
                          ? out
                          : at::empty({a.values.size(0), b.values.size(0)}, a.values.options().dtype(type));
    return at::_scaled_mm_out(made, a.values, b.values.t(), a.inverse, scale_b, {}, {}, type, options.fast_accum);
  };
  const ProductShape shape{.by_row = a.inverse.numel() > 1 || b.inverse.numel() > 1,
                           .rows = a.values.size(0),
                           .columns = b.values.size(0),
                           .inner = a.values.size(1)};
  const at::Tensor made = dtype == at::kFloat ? float32_or_bfloat16(shape, product_in) : product_in(dtype);
  if (out.defined()) return made.is_same(out) ? made : out.copy_(made);
  return made.to(dtype);
}

std::string float8_problem(at::Device device, Float8Recipe recipe) {
  if (device.is_cpu()) return "";
  const at::TensorOptions floats = at::TensorOptions(at::kFloat).device(device);
  constexpr std::int64_t kSize = 64;
  const bool by_row = recipe == Float8Recipe::rowwise;
  const at::Tensor inverse = at::ones({by_row ? kSize : 1, 1}, floats);
  const auto matrix = [&](at::ScalarType type) {
    return Float8Matrix{at::zeros({kSize, kSize}, floats.dtype(at::kByte)).view(type), inverse};
  };
  const Float8Matrix x = matrix(at::kFloat8_e4m3fn), dy = matrix(by_row ? at::kFloat8_e4m3fn : at::kFloat8_e5m2);
  try {
    float8_product(x, x, {.dtype = at::kBFloat16, .fast_accum = true});
    float8_product(dy, x, {.dtype = at::kBFloat16});
    float8_product(dy, x, {.dtype = at::kFloat});
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace phalanx::kernels
