#include "phalanx/nn/fused_linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/kernels/fused_linear.h"

namespace phalanx::nn {

FusedLinear::FusedLinear(std::int64_t in_features, std::vector<FusedPart> parts, TensorOptionsOfModule tensor)
    : Module("FusedLinear"), list_(std::move(parts)) {
  if (list_.empty()) throw ConfigError("FusedLinear: no parts: expected at least one, for example {\"q\", 512}");
  for (const FusedPart& part : list_) {
    const auto& [name, rows, has_bias] = part;
    if (rows < 1) throw ConfigError(fmt::format("FusedLinear: part '{}' has {} rows; expected at least 1", name, rows));
    if (std::ranges::count(list_, name, &FusedPart::name) > 1) {
      throw ConfigError(fmt::format("FusedLinear: two parts are called '{}'", name));
    }
    weights_.push_back(make_parameter(name, {rows, in_features}, tensor));
    biases_.push_back(has_bias ? make_parameter(part.bias_name(), {rows}, tensor, Init::constant(0.0)) : at::Tensor());
  }
  share_storage();
}

at::Tensor FusedLinear::weight(const std::string& part) const {
  const auto found = std::ranges::find(list_, part, &FusedPart::name);
  if (found == list_.end()) throw Error(fmt::format("FusedLinear: there is no part '{}'", part));
  return weights_[static_cast<std::size_t>(found - list_.begin())];
}

at::Tensor FusedLinear::forward(const at::Tensor& x) {
  std::vector<at::Tensor> weights;
  for (std::size_t i = 0; i < weights_.size(); ++i) weights.push_back(used(list_[i].name.c_str(), weights_[i]));
  at::Tensor y = gathers_ ? at::cat(gathers_->all_gather_matmul(x, weights), -1) : kernels::fused_linear(x, weights);
  if (std::ranges::none_of(biases_, [](const at::Tensor& b) { return b.defined(); })) return y;
  std::vector<at::Tensor> biases;
  for (std::size_t i = 0; i < biases_.size(); ++i) {
    const at::Tensor bias = used(list_[i].bias_name().c_str(), biases_[i]);
    biases.push_back(bias.defined() ? bias : at::zeros({weights[i].size(0)}, y.options()));
  }
  return y + at::cat(biases).to(y.scalar_type());
}

std::vector<at::Tensor> FusedLinear::parts(const at::Tensor& y) const {
  std::vector<at::Tensor> result;
  std::int64_t first = 0;
  for (const at::Tensor& weight : weights_) {
    result.push_back(y.narrow(-1, first, weight.size(0)));
    first += weight.size(0);
  }
  return result;
}

}  // namespace phalanx::nn
