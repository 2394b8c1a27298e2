#include "phalanx/testing/sim_device/torch/boxed_fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "phalanx/testing/sim_device/torch/kernel_tensors.h"
#include "phalanx/testing/sim_device/torch/operator_traits.h"
#include "phalanx/testing/sim_device/torch/output_shapes.h"
#include "phalanx/testing/sim_device/torch/registration.h"
#include "phalanx/testing/sim_device/torch/stack_values.h"

namespace phalanx::sim_device {
namespace {

using torch::jit::Stack;

void run_cpu_kernel(const c10::OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

Stack take_arguments(Stack* stack, std::size_t count) {
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(count);
  Stack arguments(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
  stack->erase(first, stack->end());
  return arguments;
}

// The one simulated device of the arguments; the current one if they name none.
int device_of(const OperatorTraits& traits, const Stack& arguments) {
  int device = -1;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!is_on_sim(tensor)) return;
      TORCH_CHECK(device < 0 || device == tensor.device().index(), "sim: ", traits.name,
                  ": tensors are on sim:", device, " and ", tensor.device(), "; expected one device");
      device = tensor.device().index();
    });
    if (argument.isDevice() && device < 0 && argument.toDevice().has_index()) device = argument.toDevice().index();
  }
  return device < 0 ? current_device() : device;
}

bool is_mask(const at::Tensor& index) { return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte; }

bool has_mask_index(const Stack& arguments) {
  bool found = false;
  for (const c10::IValue& argument : arguments)
    if (argument.isOptionalTensorList())
      for_each_tensor(argument, [&](const at::Tensor& index) { found |= is_mask(index); });
  return found;
}

// Arithmetic on CUDA converts an operand on the device that has no dimensions to the type of the other one before it
// computes; the CPU kernels keep its bits. Which argument that is; -1: none.
int scalar_operand(const OperatorTraits& traits, const Stack& arguments) {
  static const std::set<std::string_view> kArithmetic = {"aten::add.Tensor", "aten::add_.Tensor", "aten::add.out",
                                                         "aten::sub.Tensor", "aten::sub_.Tensor", "aten::sub.out",
                                                         "aten::mul.Tensor", "aten::mul_.Tensor", "aten::mul.out",
                                                         "aten::div.Tensor", "aten::div_.Tensor", "aten::div.out"};
  if (!kArithmetic.contains(traits.name)) return -1;
  for (const int one : {0, 1}) {
    const at::Tensor& scalar = arguments[static_cast<std::size_t>(one)].toTensor();
    const at::Tensor& other = arguments[static_cast<std::size_t>(1 - one)].toTensor();
    if (is_on_sim(scalar) && scalar.dim() == 0 && other.dim() > 0 && scalar.is_floating_point() &&
        other.is_floating_point() && scalar.scalar_type() != other.scalar_type())
      return one;
  }
  return -1;
}

void convert_scalar(Stack& arguments, std::size_t scalar) {
  arguments[scalar] = arguments[scalar].toTensor().to(arguments[1 - scalar].toTensor().scalar_type());
}

// Where libtorch's kernels for the CPU are not what those for CUDA are:
// - A number that is the first factor is rounded to the other one's type. x.mul_(number) puts it there.
void put_number_second(Stack& arguments) {
  const at::Tensor &a = arguments[0].toTensor(), &b = arguments[1].toTensor();
  if (a.dim() == 0 && b.dim() > 0) std::swap(arguments[0], arguments[1]);
}

// - It sums gradients in their own type; on CUDA in float32.
bool sums_in_float32(const OperatorTraits& traits) { return traits.name == "aten::embedding_dense_backward"; }

void widen(Stack& arguments) {
  for (c10::IValue& argument : arguments) {
    argument = with_tensors(argument, [](const at::Tensor& tensor) {
      return tensor.is_floating_point() && tensor.itemsize() == 2 ? tensor.to(at::kFloat) : tensor;
    });
  }
}

// The tensors of a kernel's results in the memory of the device, flat. Results that are arguments are there already.
void store(const Stack& results, const OperatorTraits& traits, const std::vector<at::Tensor>& targets) {
  auto target = targets.begin();
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (traits.returned[i] != OperatorTraits::kNew) continue;
    for_each_tensor(results[i], [&](const at::Tensor& result) {
      const at::Tensor& to = *target++;
      TORCH_CHECK(to.sizes() == result.sizes(), "sim: ", traits.name, " has a result of shape ", result.sizes(),
                  ", but ", to.sizes(), " was inferred");
      const bool is_same_type = result.scalar_type() == to.scalar_type();
      if (is_same_type && result.strides() == to.strides() && result.is_non_overlapping_and_dense()) {
        if (result.nbytes() > 0) std::memcpy(to.mutable_data_ptr(), result.const_data_ptr(), result.nbytes());
      } else {
        to.copy_(result);
      }
    });
  }
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op),
        traits_(traits_of(op)),
        arguments_(take_arguments(stack, traits_.writes.size())),
        device_(device_of(traits_, arguments_)),
        guard_(SimBackend::device(device_)) {}

  void run(Stack* stack) {
    if (traits_.writes_out && !traits_.reads_data) resize_empty_outputs();
    make_kernel_arguments();
    if (traits_.is_view) return push_views(stack);
    if (has_mask_index(arguments_) && !traits_.reads_data) wait("its index is a mask");
    if (traits_.reads_data && (!is_index() || has_mask_index(arguments_) || !traits_.has_meta))
      return run_on_host(stack);
    run_on_stream(stack);
  }

 private:
  // Its shape depends on data only where an index is a mask.
  bool is_index() const { return traits_.name == "aten::index.Tensor" || traits_.name == "aten::_index_put_impl_"; }

  void wait(const char* reason) const {
    sim_backend().runtime.synchronize(current_stream_id(device_), traits_.name + " (" + reason + ")");
  }

  void resize_empty_outputs() {
    const auto shapes = output_shapes(op_, traits_, arguments_);
    for (std::size_t i = 0; i < traits_.returned.size() && i < shapes->size(); ++i) {
      if (traits_.returned[i] == OperatorTraits::kNew || (*shapes)[i].is_list) continue;
      const c10::IValue& argument = arguments_[static_cast<std::size_t>(traits_.returned[i])];
      const TensorShape& shape = (*shapes)[i].tensors.front();
      if (argument.isTensor() && shape.is_defined && argument.toTensor().numel() == 0 &&
          argument.toTensor().sizes() != at::IntArrayRef(shape.sizes))
        resize_on_sim(argument.toTensor(), shape.sizes);
    }
  }

  void make_kernel_arguments() {
    kernel_arguments_.reserve(arguments_.size());
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      const c10::IValue& argument = arguments_[i];
      if (static_cast<int>(i) == traits_.generator) {
        kernel_arguments_.emplace_back(
            next_generator(argument.isGenerator() ? argument.toGenerator() : default_generator(device_)));
      } else if (argument.isDevice()) {
        kernel_arguments_.emplace_back(c10::Device(c10::DeviceType::CPU));
      } else {
        const bool is_index_list = argument.isOptionalTensorList();
        kernel_arguments_.push_back(with_tensors(argument, [&](const at::Tensor& tensor) {
          return kernel_argument(tensor, traits_.writes[i], is_index_list);
        }));
      }
    }
  }

  at::Tensor kernel_argument(const at::Tensor& tensor, bool is_written, bool is_index) {
    if (is_on_sim(tensor)) {
      add_accesses(accesses_, tensor, is_written);
      return kernel_view(tensor);
    }
    TORCH_CHECK(tensor.device().is_cpu() && !is_written && (tensor.dim() == 0 || is_index), "sim: ", traits_.name,
                ": a tensor of shape ", tensor.sizes(), " is on ", tensor.device(), ", expected sim:", device_,
                ". Copy it there first");
    if (tensor.dim() > 0) wait("an index is on the host");
    at::Tensor copy = tensor.clone();  // the host may change it as soon as this returns
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  void push_views(Stack* stack) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    run_cpu_kernel(op_, &kernel_arguments_);
    const at::Tensor& base = arguments_.front().toTensor();
    for (const c10::IValue& result : kernel_arguments_)
      stack->push_back(with_tensors(result, [&](const at::Tensor& view) {
        return view_of(base, view.sizes(), view.strides(), view.storage_offset(), view.dtype());
      }));
  }

  void run_on_host(Stack* stack) {
    TORCH_CHECK(std::ranges::none_of(traits_.writes, [](bool is_written) { return is_written; }), "sim: ", traits_.name,
                " writes into its arguments, and their shape depends on data, which is not supported");
    launch(device_, traits_.name.c_str(), std::move(accesses_), [] {});
    wait("its result's shape depends on data");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    run_cpu_kernel(op_, &kernel_arguments_);
    for (const c10::IValue& result : kernel_arguments_)
      stack->push_back(with_tensors(result, [&](const at::Tensor& tensor) {
        at::Tensor on_device = empty_on_sim(tensor.sizes(), tensor.strides(), tensor.scalar_type());
        launch(device_, traits_.name.c_str(), accesses_of({}, on_device),
               [to = kernel_view(on_device), tensor] { to.copy_(tensor); });
        return on_device;
      }));
  }

  void run_on_stream(Stack* stack) {
    std::vector<at::Tensor> targets;
    if (traits_.makes_new) {
      make_results(stack, targets);
    } else {
      for (const int argument : traits_.returned) stack->push_back(arguments_[static_cast<std::size_t>(argument)]);
    }
    launch(device_, traits_.name.c_str(), std::move(accesses_),
           [op = op_, &traits = traits_, arguments = std::move(kernel_arguments_), targets = std::move(targets),
            scalar = scalar_operand(traits_, arguments_)]() mutable {
             if (scalar >= 0) convert_scalar(arguments, static_cast<std::size_t>(scalar));
             if (traits.name == "aten::mul.out") put_number_second(arguments);
             if (sums_in_float32(traits)) widen(arguments);
             run_cpu_kernel(op, &arguments);
             store(arguments, traits, targets);
           });
  }

  void make_results(Stack* stack, std::vector<at::Tensor>& targets) {
    const auto shapes = output_shapes(op_, traits_, arguments_);
    for (std::size_t i = 0; i < traits_.returned.size(); ++i) {
      if (traits_.returned[i] != OperatorTraits::kNew) {
        stack->push_back(arguments_[static_cast<std::size_t>(traits_.returned[i])]);
        continue;
      }
      c10::List<at::Tensor> made;
      for (const TensorShape& shape : (*shapes)[i].tensors) made.push_back(make_result(shape, targets));
      if ((*shapes)[i].is_list) {
        stack->emplace_back(std::move(made));
      } else {
        stack->emplace_back(made.get(0));
      }
    }
  }

  at::Tensor make_result(const TensorShape& shape, std::vector<at::Tensor>& targets) {
    if (!shape.is_defined) return {};
    at::Tensor result = empty_on_sim(shape.sizes, shape.strides, shape.dtype);
    add_accesses(accesses_, result, true);
    targets.push_back(kernel_view(result));
    return result;
  }

  const c10::OperatorHandle& op_;
  const OperatorTraits& traits_;
  Stack arguments_;
  int device_;
  c10::DeviceGuard guard_;
  Stack kernel_arguments_;
  std::vector<Access> accesses_;
};

}  // namespace

void run_boxed(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(stack); }

}  // namespace phalanx::sim_device
