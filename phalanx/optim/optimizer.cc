#include "phalanx/optim/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <unordered_map>
#include <unordered_set>

#include "phalanx/base/error.h"

namespace phalanx {

Optimizer::Optimizer(std::vector<NamedTensor> parameters) : parameters_(std::move(parameters)) {
  if (parameters_.empty()) {
    throw Error("an optimizer was given no parameters: pass the model's named parameters that require grad");
  }
  std::unordered_set<std::string> names;
  std::unordered_map<const void*, std::string> tensors;
  for (const auto& [name, tensor, shard] : parameters_) {
    if (!tensor.defined()) throw Error(fmt::format("optimizer: parameter '{}' is an undefined tensor", name));
    if (!tensor.is_floating_point()) {
      throw Error(fmt::format("optimizer: parameter '{}' has dtype {}, expected a floating-point dtype", name,
                              c10::toString(tensor.scalar_type())));
    }
    if (!names.insert(name).second) throw Error(fmt::format("optimizer: two parameters are named '{}'", name));
    const auto [other, is_new] = tensors.emplace(tensor.unsafeGetTensorImpl(), name);
    if (!is_new) {
      throw Error(
          fmt::format("optimizer: '{}' and '{}' are one tensor: pass a shared parameter once", other->second, name));
    }
  }
}

void Optimizer::zero_grad() {
  for (auto& [name, tensor, shard] : parameters_) tensor.mutable_grad().reset();
}

std::vector<at::Tensor> Optimizer::zeros_like_parameters() const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> result;
  result.reserve(parameters_.size());
  for (const auto& [name, tensor, shard] : parameters_) result.push_back(at::zeros_like(tensor));
  return result;
}

void Optimizer::collect(TrainState& state, const std::vector<NamedTensor>& parameters,
                        const std::vector<at::Tensor>& tensors, const std::string& what) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    state.tensors.push_back({"optimizer." + parameters[i].name + "." + what, tensors[i]});
  }
}

}  // namespace phalanx
