#include "phalanx/testing/sim_device/torch/output_shapes.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DispatchKeySet.h>

#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "phalanx/testing/sim_device/torch/stack_values.h"

namespace phalanx::sim_device {
namespace {

using Shapes = std::shared_ptr<const std::vector<ResultShape>>;

// A text that is the same for calls whose results have the same shapes.
class Signature {
 public:
  Signature(const c10::OperatorHandle& op, const OperatorTraits& traits, const torch::jit::Stack& arguments)
      : numbers_matter_(!traits.has_tensor_input) {
    const void* schema = &op.schema();
    add_bytes(&schema, sizeof(schema));
    for (const c10::IValue& argument : arguments) add(argument);
  }
  const std::string& text() const { return text_; }

 private:
  void add(const c10::IValue& value) {
    text_ += static_cast<char>(value.isTensor() + 2 * value.isTensorList() + 4 * value.isOptionalTensorList() +
                               8 * value.isInt() + 16 * value.isBool() + 32 * value.isDouble() + 64 * value.isNone());
    for_each_tensor(value, [&](const at::Tensor& tensor) { add(tensor); });
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) text_ += tensor ? '1' : '0';
    if (value.isInt()) add_number(value.toInt());
    if (value.isBool()) text_ += value.toBool() ? '1' : '0';
    if (value.isDouble() && numbers_matter_) add_number(value.toDouble());
    if (value.isIntList()) add_list(value.toIntVector());
    if (value.isDoubleList()) add_list(value.toDoubleVector());
    if (value.isBoolList())
      for (const bool one : value.toBoolList()) text_ += one ? '1' : '0';
    if (value.isString()) text_ += value.toStringRef();
  }
  void add(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    text_ += static_cast<char>(tensor.scalar_type());
    text_ += static_cast<char>(impl.dim());
    text_ += impl.is_wrapped_number() ? 'w' : 't';
    add_bytes(impl.sizes().data(), impl.sizes().size() * sizeof(std::int64_t));
    add_bytes(impl.strides().data(), impl.strides().size() * sizeof(std::int64_t));
  }
  template <class Number>
  void add_number(Number number) {
    add_bytes(&number, sizeof(number));
  }
  template <class Number>
  void add_list(const std::vector<Number>& numbers) {
    add_number(numbers.size());
    add_bytes(numbers.data(), numbers.size() * sizeof(Number));
  }
  void add_bytes(const void* bytes, std::size_t count) { text_.append(static_cast<const char*>(bytes), count); }

  const bool numbers_matter_;
  std::string text_;
};

at::Tensor meta_like(const at::Tensor& tensor) {
  return at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
}

at::Tensor zeros_like_on_cpu(const at::Tensor& tensor) {
  at::Tensor zeros(at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
  if (zeros.storage().nbytes() > 0) std::memset(zeros.mutable_data_ptr(), 0, zeros.storage().nbytes());
  return zeros;
}

// The operator's results on stand-ins for its arguments.
torch::jit::Stack run_on(c10::DeviceType device, const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  const bool on_meta = device == c10::DeviceType::Meta;
  torch::jit::Stack stack;
  for (const c10::IValue& argument : arguments) {
    if (argument.isGenerator()) {
      stack.emplace_back(at::detail::createCPUGenerator());
    } else if (argument.isDevice()) {
      stack.emplace_back(c10::Device(device));
    } else {
      stack.push_back(with_tensors(argument, [&](const at::Tensor& tensor) {
        at::Tensor stand_in = on_meta ? meta_like(tensor) : zeros_like_on_cpu(tensor);
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) stand_in.unsafeGetTensorImpl()->set_wrapped_number(true);
        return stand_in;
      }));
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(on_meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU), &stack);
  return stack;
}

TensorShape shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec()};
}

std::vector<ResultShape> shapes_of(const torch::jit::Stack& results, const OperatorTraits& traits) {
  std::vector<ResultShape> shapes;
  for (const c10::IValue& result : results) {
    TORCH_CHECK(result.isTensor() || result.isTensorList(), "sim: ", traits.name,
                " returns something other than tensors");
    ResultShape& shape = shapes.emplace_back(ResultShape{result.isTensorList(), {}});
    if (result.isTensor()) {
      shape.tensors.push_back(shape_of(result.toTensor()));
    } else {
      for (const at::Tensor& tensor : result.toTensorVector()) shape.tensors.push_back(shape_of(tensor));
    }
  }
  return shapes;
}

Shapes infer_shapes(const c10::OperatorHandle& op, const OperatorTraits& traits, const torch::jit::Stack& arguments) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  torch::jit::Stack results;
  bool is_known = false;
  if (traits.has_meta) {
    try {
      results = run_on(c10::DeviceType::Meta, op, arguments);
      is_known = true;
    } catch (const c10::Error&) {
      // Some meta kernels refuse what the operator supports; if it refuses too, the next line says so.
    }
  }
  if (!is_known) results = run_on(c10::DeviceType::CPU, op, arguments);
  return std::make_shared<const std::vector<ResultShape>>(shapes_of(results, traits));
}

}  // namespace

Shapes output_shapes(const c10::OperatorHandle& op, const OperatorTraits& traits, const torch::jit::Stack& arguments) {
  static std::mutex mutex;
  static auto& cache = *new std::unordered_map<std::string, Shapes>;
  const Signature signature(op, traits, arguments);
  {
    const std::lock_guard lock(mutex);
    if (const auto known = cache.find(signature.text()); known != cache.end()) return known->second;
  }
  Shapes shapes = infer_shapes(op, traits, arguments);
  const std::lock_guard lock(mutex);
  return cache[signature.text()] = std::move(shapes);
}

}  // namespace phalanx::sim_device
