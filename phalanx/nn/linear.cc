#include "phalanx/nn/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <fmt/format.h>

#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/tensor/grad_ready.h"

namespace phalanx::nn {

Linear::Linear(const LinearOptions& options, TensorOptionsOfModule tensor) : Module("Linear"), options_(options) {
  weight = make_parameter("weight", {options.out_features, options.in_features}, tensor);
  if (options.bias) bias = make_parameter("bias", {options.out_features}, tensor, Init::constant(0.0));
}

void Linear::add_adapter(const AdapterOptions& options) {
  if (options.rank < 1) throw ConfigError(fmt::format("adapter: rank is {}: expected 1 or more", options.rank));
  if (has_adapter() || shard_of("weight")) {
    throw Error(has_adapter() ? "adapter: the layer has one already"
                              : "adapter: the layer is split over ranks already; add adapters before that");
  }
  const TensorOptionsOfModule tensor = {.dtype = options.dtype.value_or(weight.scalar_type()),
                                        .device = weight.device(),
                                        .without_memory = !has_memory(weight)};
  // As in PEFT: the initial values of a layer of torch.
  const double bound = 1.0 / std::sqrt(static_cast<double>(options_.in_features));
  lora_a = make_parameter("lora_A", {options.rank, options_.in_features}, tensor, Init::uniform(-bound, bound));
  lora_b = make_parameter("lora_B", {options_.out_features, options.rank}, tensor, options.b);
  adapter_scale_ = options.scale;
  if (options.dropout == 0) return;
  adapter_dropout_ = register_module("lora_dropout", std::make_shared<Dropout>(options.dropout));
}

void Linear::store_in_nf4(const std::string& name, Nf4Tables tables) {
  const std::int64_t in = options_.in_features, out = options_.out_features;
  if (in % kNf4Block != 0) {
    throw ConfigError(
        fmt::format("{}: rows of {} elements are no whole blocks of {}, which NF4 stores with one scale; expected a "
                    "multiple of {}, or a base in another type",
                    name, in, kNf4Block, kNf4Block));
  }
  if (shard_of("weight")) throw Error(name + ": split over ranks already; store weights in NF4 before that");
  dense_init_ = init_of("weight");
  const TensorOptionsOfModule tensor = {
      .dtype = at::kByte, .device = weight.device(), .without_memory = !has_memory(weight)};
  const Init nothing = Init::constant(0.0);  // the bytes are made of the whole weight
  weight_absmax = make_parameter("weight_absmax", {out, in / kNf4Block}, tensor, nothing);
  weight_nested = make_parameter("weight_nested", {nf4_nested_bytes(out * in)}, tensor, nothing);
  const observe::MemoryScope scope(observe::MemoryCategory::parameters);
  at::Tensor codes = at::empty({tensor.without_memory ? 0 : out, in / 2}, weight.options().dtype(at::kByte));
  if (tensor.without_memory) codes.unsafeGetTensorImpl()->set_sizes_contiguous({out, in / 2});
  weight.set_requires_grad(false);
  weight.set_data(codes);
  set_init("weight", nothing);
  nf4_tables_ = std::move(tables);
  set_narrow_weight();
}

at::Tensor Linear::product_with_nf4(const at::Tensor& x) const {
  kernels::Nf4Part part{.columns = options_.in_features};
  if (const auto shard = shard_of("weight")) {
    const Box box = shard->box();
    part.first_row = box.offsets[0];
    part.first_column = 2 * box.offsets[1];
  }
  const kernels::Nf4Weight stored{used_weight(), used("weight_absmax", weight_absmax),
                                  used("weight_nested", weight_nested), nf4_tables_};
  return kernels::nf4_linear(x, stored, part, used_bias());
}

kernels::LowRank Linear::low_rank(const at::Tensor& x) {
  if (!has_adapter()) return {};
  const at::Tensor low = kernels::linear(adapter_dropout_ ? call(adapter_dropout_, x) : x, used("lora_A", lora_a));
  return {low * adapter_scale_, used("lora_B", lora_b)};
}

at::Tensor Linear::adapted(const at::Tensor& y, const at::Tensor& x) {
  const at::Tensor a = used("lora_A", lora_a), b = used("lora_B", lora_b);
  const at::Tensor low = kernels::linear(adapter_dropout_ ? call(adapter_dropout_, x) : x, a);  // [..., rank]
  return y.add(kernels::linear(low, b).to(y.scalar_type()), adapter_scale_);
}

// What the exchange would multiply piece by piece is multiplied at once: a scale is of all rows.
at::Tensor Linear::forward_in_float8(const at::Tensor& x) const {
  at::Tensor y = kernels::float8_linear(gathers_ ? gathers_->gather(x) : x, used_weight(), float8_);
  if (scatters_) y = scatters_->scatter(y);
  const at::Tensor b = used_bias();
  return b.defined() ? y + b.to(y.scalar_type()) : y;
}

at::Tensor Linear::forward(const at::Tensor& x) {
  if (float8_ && has_adapter()) throw Error("a linear layer with an adapter has no float8 products");
  if (options_.in_float32 && (float8_ || has_adapter() || nf4_tables_ || gathers_ || scatters_)) {
    throw Error("a linear layer in float32 has no adapter, no weight in fewer bits and no exchange of rows");
  }
  if (float8_) return forward_in_float8(x);
  if (nf4_tables_) {
    const at::Tensor y = product_with_nf4(x);
    return has_adapter() ? adapted(y, x) : y;
  }
  const at::Tensor w = used_weight(), b = used_bias();
  if (options_.in_float32) {
    const kernels::AutocastScope exact(x.device().type(), {.enabled = false});
    return kernels::linear(x.to(at::kFloat), w.to(at::kFloat), b.defined() ? b.to(at::kFloat) : b);
  }
  if (has_adapter()) return adapted(kernels::linear(x, w, b), x);
  if (!gathers_ && !scatters_) return kernels::linear(x, w, b);
  const at::Tensor y = gathers_ ? gathers_->all_gather_matmul(x, {w})[0] : scatters_->matmul_reduce_scatter(x, w);
  return b.defined() ? y + b : y;
}

}  // namespace phalanx::nn
