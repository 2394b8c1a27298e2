#include "phalanx/kernels/float8_linear.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/deferred_weights.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/tensor/scale_in_place.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx::kernels {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct SavedOptions : torch::CustomClassHolder {
  explicit SavedOptions(std::shared_ptr<const Float8LinearOptions> options) : options(std::move(options)) {}
  std::shared_ptr<const Float8LinearOptions> options;
};
using SavedOptionsPtr = c10::intrusive_ptr<SavedOptions>;

Float8CastOptions of_weight(const Float8LinearOptions& how, at::ScalarType through) {
  return {.recipe = how.recipe, .through = through, .cut = how.cut, .max_over_ranks = &how.max_over_ranks};
}

Float8CastOptions of_input(const Float8LinearOptions& how) {
  return {.recipe = how.recipe,
          .cut = how.cut == Float8Cut::columns ? Float8Cut::columns : Float8Cut::none,
          .max_over_ranks = &how.max_over_ranks};
}

Float8CastOptions of_gradient(const Float8LinearOptions& how) {
  return {.recipe = how.recipe,
          .to = how.recipe == Float8Recipe::tensorwise ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn,
          .cut = how.cut == Float8Cut::rows ? Float8Cut::columns : Float8Cut::none,
          .max_over_ranks = &how.max_over_ranks};
}

at::Tensor as_rows(const at::Tensor& x, std::int64_t width) { return x.reshape({-1, width}).contiguous(); }

std::vector<std::int64_t> with_width(const at::Tensor& like, std::int64_t width) {
  std::vector<std::int64_t> shape = like.sizes().vec();
  shape.back() = width;
  return shape;
}

void add_product(const Float8Matrix& dy, const Float8Matrix& x, const WeightGradient& dweight, bool emulate) {
  if (dweight.beta == 0.0) {
    float8_product(dy, x, {.out = dweight.out, .emulate = emulate});
    return;
  }
  const at::Tensor made = float8_product(dy, x, {.dtype = dweight.out.scalar_type(), .emulate = emulate});
  if (dweight.beta != 1.0) scale_in_place(dweight.out, dweight.beta);
  dweight.out.add_(made);
}

struct Float8LinearsFunction : torch::autograd::Function<Float8LinearsFunction> {
  static constexpr std::size_t kOfWeight = 3;  // saved tensors of each weight, after x's

  static tensor_list forward(AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& w0,
                             const std::optional<at::Tensor>& w1, const std::optional<at::Tensor>& w2, bool record,
                             const SavedOptionsPtr& saved_options) {
    const Float8LinearOptions& how = *saved_options->options;
    tensor_list weights = {w0};
    for (const auto& weight : {w1, w2}) {
      if (weight) weights.push_back(*weight);
    }
    Float8CastOptions cast_x = of_input(how);
    cast_x.transposed = record && std::ranges::any_of(weights, [](const at::Tensor& w) { return w.requires_grad(); });
    const Float8Cast x = cast_to_float8(as_rows(x_in, x_in.size(-1)), cast_x);
    tensor_list saved = {x.transposed.values, x.transposed.inverse}, results;
    for (const at::Tensor& weight : weights) {
      Float8CastOptions cast_weight = of_weight(how, x_in.scalar_type());
      // One that is cast anyway is kept in float8.
      // Others are there in the backward pass, too: gathered again if need be.
      cast_weight.transposed = record && weight.scalar_type() != x_in.scalar_type();
      const Float8Cast used = cast_to_float8(weight.contiguous(), cast_weight);
      saved.insert(saved.end(),
                   {weight, cast_weight.transposed ? used.transposed.values : used.amax, used.transposed.inverse});
      results.push_back(computed_once(SavedOp::linear, [&] {
        const Float8ProductOptions options{.dtype = x_in.scalar_type(), .fast_accum = true, .emulate = how.emulate};
        return tensor_list{float8_product(x.plain, used.plain, options).view(with_width(x_in, weight.size(0)))};
      })[0]);
    }
    if (record) {
      ctx->save_for_backward(saved);
      ctx->saved_data["options"] = c10::IValue::make_capsule(saved_options);
      ctx->saved_data["dtype"] = static_cast<std::int64_t>(x_in.scalar_type());
      save_queue_for_backward(*ctx);
    }
    return results;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    if (at::GradMode::is_enabled()) {
      throw Error("linear layers in float8 have no second derivative: run backward() without create_graph");
    }
    const auto capsule = ctx->saved_data.at("options").toCapsule();
    const auto options = static_cast<const SavedOptions&>(*capsule).options;
    const Float8LinearOptions& how = *options;
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data.at("dtype").toInt());
    const auto saved = ctx->get_saved_variables();
    const Float8Matrix x{saved[0], saved[1]};
    at::Tensor dx;
    tensor_list result(6);
    for (std::size_t i = 0; i < grads.size(); ++i) {
      const at::Tensor& weight = saved[2 + kOfWeight * i];
      Float8CastOptions cast_dy = of_gradient(how);
      cast_dy.plain = ctx->needs_input_grad(0);
      cast_dy.transposed = ctx->needs_input_grad(i + 1);
      if (!cast_dy.plain && !cast_dy.transposed) continue;
      const Float8Cast dy = cast_to_float8(as_rows(grads[i], weight.size(0)), cast_dy);
      if (cast_dy.plain) {
        const Float8ProductOptions product{.dtype = dtype, .emulate = how.emulate};
        const at::Tensor own = float8_product(dy.plain, transposed_weight(saved, i, dtype, how), product);
        dx = dx.defined() ? dx.add_(own) : own;
      }
      if (!cast_dy.transposed) continue;
      if (const auto ref = queue_for(*ctx, weight); ref.queue) {
        ref.queue->put(ref.key, weight, [dy = dy.transposed, x, emulate = how.emulate](const WeightGradient& dweight) {
          add_product(dy, x, dweight, emulate);
        });
        continue;
      }
      const WeightGradient dweight = weight_gradient(weight);
      add_product(dy.transposed, x, dweight, how.emulate);
      result[i + 1] = dweight.returned;
    }
    if (dx.defined()) result[0] = dx.view(with_width(grads[0], dx.size(1)));
    return result;
  }

 private:
  static Float8Matrix transposed_weight(const tensor_list& saved, std::size_t i, at::ScalarType dtype,
                                        const Float8LinearOptions& how) {
    const std::size_t at = 2 + kOfWeight * i;
    if (saved[at + 2].defined()) return {saved[at + 1], saved[at + 2]};
    Float8CastOptions again = of_weight(how, dtype);
    again.plain = false;
    again.transposed = true;
    again.amax = saved[at + 1];
    return cast_to_float8(saved[at].detach().contiguous(), again).transposed;
  }
};

}  // namespace

std::vector<at::Tensor> float8_linears(const at::Tensor& x_in, const std::vector<at::Tensor>& weights,
                                       const std::shared_ptr<const Float8LinearOptions>& options) {
  if (weights.empty() || weights.size() > 3) {
    throw Error(fmt::format("float8_linears: {} weights; expected one to three", weights.size()));
  }
  std::vector<at::Tensor> results;
  const at::Tensor x = in_autocast_type(x_in);
  if (x.numel() == 0) {
    for (const at::Tensor& weight : weights) results.push_back(kernels::linear(x, weight));
    return results;
  }
  const bool record =
      at::GradMode::is_enabled() &&
      (x.requires_grad() || std::ranges::any_of(weights, [](const at::Tensor& w) { return w.requires_grad(); }));
  const auto other = [&](std::size_t i) { return i < weights.size() ? std::optional(weights[i]) : std::nullopt; };
  return Float8LinearsFunction::apply(x, weights[0], other(1), other(2), record,
                                      c10::make_intrusive<SavedOptions>(options));
}

}  // namespace phalanx::kernels
