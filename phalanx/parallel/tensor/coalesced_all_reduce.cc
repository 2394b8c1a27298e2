#include "phalanx/parallel/tensor/coalesced_all_reduce.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "phalanx/comm/communicator.h"
#include "phalanx/parallel/tensor/functional_collectives.h"

namespace phalanx {
namespace {

using torch::autograd::tensor_list;

struct CoalescedGroup : torch::CustomClassHolder {
  explicit CoalescedGroup(std::shared_ptr<Communicator> comm) : comm(std::move(comm)) {}
  std::shared_ptr<Communicator> comm;
};

struct CoalescedAllReduce : torch::autograd::Function<CoalescedAllReduce> {
  static tensor_list forward(torch::autograd::AutogradContext* ctx, at::TensorList parameters,
                             const c10::intrusive_ptr<CoalescedGroup>& group) {
    ctx->saved_data["group"] = c10::IValue::make_capsule(group);
    return parameters.vec();
  }

  static tensor_list backward(torch::autograd::AutogradContext* ctx, const tensor_list& grads) {
    const auto capsule = ctx->saved_data.at("group").toCapsule();
    const std::shared_ptr<Communicator>& comm = static_cast<const CoalescedGroup&>(*capsule).comm;
    tensor_list result;
    if (at::GradMode::is_enabled()) {
      for (const at::Tensor& grad : grads) result.push_back(reduce_from_group(grad, comm));
      result.emplace_back();
      return result;
    }
    for (const at::Tensor& grad : grads) result.push_back(grad.reshape({-1}));
    const at::Tensor sums = at::cat(result);
    comm->all_reduce(sums);
    std::int64_t first = 0;
    for (std::size_t i = 0; i < grads.size(); ++i) {
      result[i] = sums.narrow(0, first, grads[i].numel()).view(grads[i].sizes());
      first += grads[i].numel();
    }
    result.emplace_back();
    return result;
  }
};

}  // namespace

void coalesce_all_reduces(nn::Module& parent, const std::vector<CoalescedParameter>& parameters,
                          const std::shared_ptr<Communicator>& group) {
  // The substitute for each parameter in the current forward pass; its use takes it.
  const auto uses = std::make_shared<tensor_list>(parameters.size());
  parent.add_pre_forward_hook([uses, parameters, group](nn::Module&) {
    uses->assign(parameters.size(), at::Tensor());
    if (!at::GradMode::is_enabled()) return;
    tensor_list all;
    for (const auto& [module, name] : parameters) all.push_back(module->named_parameters(/*recurse=*/false)[name]);
    for (const at::Tensor& parameter : all) {
      if (!parameter.requires_grad()) return;  // each by itself
    }
    *uses = CoalescedAllReduce::apply(at::TensorList(all), c10::make_intrusive<CoalescedGroup>(group));
  });
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].module->set_parameter_use(parameters[i].name, [uses, group, i](const at::Tensor& parameter) {
      const at::Tensor use = std::exchange((*uses)[i], at::Tensor());
      return use.defined() ? use : copy_to_group(parameter, group);
    });
  }
}

}  // namespace phalanx
