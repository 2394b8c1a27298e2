// Tensors within the boxed values of an operator's stack.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <optional>
#include <utility>

namespace phalanx::sim_device {

/// Calls body(tensor) for every defined tensor of a tensor, a list of tensors, or a list of optional tensors.
template <class Body>
void for_each_tensor(const c10::IValue& value, Body&& body) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) body(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector())
      if (tensor.defined()) body(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor && tensor->defined()) body(*tensor);
  }
}

/// The value with map(tensor) in place of every defined tensor. Undefined ones stay, and so do all other values.
template <class Map>
c10::IValue with_tensors(const c10::IValue& value, Map&& map) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(map(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? map(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

}  // namespace phalanx::sim_device
