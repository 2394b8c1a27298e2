#include "phalanx/optim/optimizer.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/optim/widen.h"
#include "phalanx/tensor/scale_in_place.h"

namespace phalanx {
namespace {

void check_parameter(const NamedTensor& parameter) {
  const auto& [name, tensor, shard] = parameter;
  if (!tensor.defined()) throw Error(fmt::format("optimizer: parameter '{}' is an undefined tensor", name));
  if (!tensor.is_floating_point()) {
    throw Error(fmt::format("optimizer: parameter '{}' has dtype {}, expected a floating-point dtype", name,
                            c10::toString(tensor.scalar_type())));
  }
  if (!shard) return;
  if (const auto& axes = shard->spec.placement().partial; !axes.empty()) {
    throw Error(fmt::format("optimizer: parameter '{}' is an addend along '{}' ({}): expected values", name,
                            axes.front(), shard->spec.text()));
  }
  const Box box = shard->box();
  if (tensor.sizes() != at::IntArrayRef(box.shape)) {
    throw Error(
        fmt::format("optimizer: parameter '{}' has the shape [{}] on rank {} of its mesh, whose part is {} of {}", name,
                    fmt::join(tensor.sizes(), ", "), shard->rank, box.text(), shard->spec.text()));
  }
}

/// The shard of a parameter, in the dtype of its state.
std::shared_ptr<const Shard> shard_of_state(const std::shared_ptr<const Shard>& shard, const at::Tensor& state) {
  if (!shard) return nullptr;
  const DataType type = state.scalar_type() == at::kBFloat16 ? DataType::bf16 : DataType::f32;
  const ShardSpec& spec = shard->spec;
  if (spec.dtype() == type || (state.scalar_type() != at::kFloat && state.scalar_type() != at::kBFloat16)) return shard;
  return std::make_shared<const Shard>(
      Shard{ShardSpec(spec.name(), spec.shape(), type, spec.mesh(), spec.placement()), shard->rank});
}

}  // namespace

Optimizer::Optimizer(std::vector<NamedTensor> parameters, Storage storage)
    : parameters_(std::move(parameters)), storage_(storage), settings_(parameters_.size()) {
  if (parameters_.empty()) {
    throw Error("an optimizer was given no parameters: pass the model's named parameters that require grad");
  }
  std::unordered_set<std::string> names;
  std::unordered_map<const void*, std::string> tensors;
  for (const auto& parameter : parameters_) {
    check_parameter(parameter);
    const auto& name = parameter.name;
    if (!names.insert(name).second) throw Error(fmt::format("optimizer: two parameters are named '{}'", name));
    const auto [other, is_new] = tensors.emplace(parameter.tensor.unsafeGetTensorImpl(), name);
    if (!is_new) {
      throw Error(
          fmt::format("optimizer: '{}' and '{}' are one tensor: pass a shared parameter once", other->second, name));
    }
  }
  const at::NoGradGuard no_grad;
  const observe::MemoryScope scope(observe::MemoryCategory::optimizer);
  for (const auto& [name, tensor, shard] : parameters_) {
    const bool has_master = storage_.master_weights && is_16_bit(tensor.scalar_type());
    const auto layout = storage_.row_major ? at::MemoryFormat::Contiguous : at::MemoryFormat::Preserve;
    masters_.push_back(has_master ? at::empty_like(tensor, at::kFloat, layout).copy_(tensor) : at::Tensor());
  }
}

bool Optimizer::widens(const at::Tensor& parameter) const {
  return storage_.widens && is_16_bit(parameter.scalar_type());
}

void Optimizer::set_groups(const std::string& who, double weight_decay, const std::vector<std::string>& no_decay,
                           const std::vector<ParameterGroup>& groups) {
  std::vector<std::string> names;
  names.reserve(parameters_.size());
  for (const auto& parameter : parameters_) names.push_back(parameter.name);
  settings_ = settings_by_name(who, names, weight_decay, no_decay, groups);
}

void Optimizer::check_options(const StepOptions& options) const {
  const auto check = [&](const char* what, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    for (const auto& [name, parameter, shard] : parameters_) {
      if (tensor.dim() == 0 && tensor.device() == parameter.device()) continue;
      throw Error(fmt::format("optimizer: {} is of shape [{}] on {}; expected a 0-dim tensor on {}, as parameter '{}'",
                              what, fmt::join(tensor.sizes(), ", "), tensor.device().str(), parameter.device().str(),
                              name));
    }
  };
  check("grad_factor_tensor", options.grad_factor_tensor);
  check("skip", options.skip);
  if (options.skip.defined() && options.skip.scalar_type() != at::kFloat) {
    throw Error(
        fmt::format("optimizer: skip is of dtype {}; expected float32", c10::toString(options.skip.scalar_type())));
  }
}

Optimizer::Target Optimizer::target_of(std::size_t index, double lr, const StepOptions& options) const {
  const auto& [name, parameter, shard] = parameters_[index];
  const at::Tensor& grad = parameter.grad();
  if (grad.is_sparse()) throw Error(fmt::format("optimizer: the gradient of '{}' is sparse; expected dense", name));
  if (grad.sizes() != parameter.sizes() || grad.device() != parameter.device()) {
    throw Error(fmt::format("optimizer: the gradient of '{}' is [{}] on {}; the parameter is [{}] on {}", name,
                            fmt::join(grad.sizes(), ", "), grad.device().str(), fmt::join(parameter.sizes(), ", "),
                            parameter.device().str()));
  }
  // The kernels walk through all tensors side by side, in memory order. The state has the parameter's layout if that
  // has no gaps. A parameter with gaps, or a gradient of another layout, is updated through a copy.
  const ParameterSettings& settings = settings_[index];
  Target target{.index = index,
                .parameter = parameter,
                .grad = grad,
                .narrow = {},
                .lr = lr * settings.lr_factor,
                .weight_decay = settings.weight_decay,
                .grad_factor = options.grad_factor,
                .grad_factor_tensor = options.grad_factor_tensor};
  if (masters_[index].defined()) {
    target.parameter = masters_[index];
    target.narrow = parameter;
    if (parameter.strides() != target.parameter.strides()) {
      target.narrow = at::empty_like(target.parameter, parameter.scalar_type()).copy_(parameter);
    }
  } else if (storage_.row_major && !parameter.is_contiguous()) {
    target.parameter = at::empty_like(parameter, at::MemoryFormat::Contiguous).copy_(parameter);
  } else if (!parameter.is_non_overlapping_and_dense()) {
    target.parameter = at::empty_like(parameter).copy_(parameter);
  }
  const bool is_narrow = is_16_bit(target.parameter.scalar_type());  // then the step is in float32
  const at::ScalarType type = is_narrow ? at::kFloat : target.parameter.scalar_type();
  const bool widened_later = is_16_bit(grad.scalar_type()) && type == at::kFloat;
  if (grad.strides() != target.parameter.strides() || (grad.scalar_type() != type && !widened_later)) {
    target.grad = at::empty_like(target.parameter, widened_later ? grad.scalar_type() : type).copy_(grad);
  }
  return target;
}

void Optimizer::step(double lr, StepOptions options) {
  const at::NoGradGuard no_grad;
  check_options(options);
  // On the CPU nobody waits for a value.
  if (options.skip.defined() && options.skip.device().is_cpu()) {
    if (std::exchange(options.skip, {}).item<double>() != 0) return;
  }
  if (options.grad_factor_tensor.defined() && options.grad_factor_tensor.device().is_cpu()) {
    options.grad_factor *= std::exchange(options.grad_factor_tensor, {}).item<double>();
  }
  std::vector<Target> targets;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].tensor.grad().defined()) targets.push_back(target_of(i, lr, options));
  }
  const auto skip = options.skip.defined() ? std::optional(options.skip) : std::nullopt;
  prepare(targets, skip);
  std::vector<Target> on_cpu, narrow;
  // By device, dtype, rate and weight decay.
  std::map<std::tuple<int, int, double, double>, std::vector<Target>> by_libtorch;
  for (auto& target : targets) {
    const bool is_wide = target.parameter.scalar_type() == at::kFloat;
    if (target.parameter.device().is_cpu() && (is_wide || widens(target.parameter))) {
      on_cpu.push_back(target);
    } else if (is_16_bit(target.parameter.scalar_type()) && !widens(target.parameter)) {
      narrow.push_back(target);
    } else {
      target.narrow.reset();  // rounded below, all at once
      const at::Device device = target.parameter.device();
      by_libtorch[{static_cast<int>(device.type()) * 256 + device.index(),
                   static_cast<int>(target.parameter.scalar_type()), target.lr, target.weight_decay}]
          .push_back(target);
    }
  }
  if (!on_cpu.empty()) step_on_cpu(on_cpu);
  for (const Target& target : narrow) step_widened(target, skip);
  for (const auto& [key, group] : by_libtorch) {
    const bool is_float = std::get<1>(key) == static_cast<int>(at::kFloat);
    const bool has_masters = std::ranges::any_of(group, [&](const Target& t) { return masters_[t.index].defined(); });
    if (!is_float || has_masters || !step_by_gpu_kernel(group, skip)) step_group_by_libtorch(group, skip);
  }
  for (const auto& target : targets) {
    const at::Tensor& parameter = parameters_[target.index].tensor;
    const at::Tensor& stepped = target.narrow.defined() ? target.narrow : target.parameter;
    if (!stepped.is_same(parameter)) {
      parameter.copy_(stepped);
    } else {
      // As libtorch's operators do: a backward pass through the old values is then an error, not a wrong result.
      parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
}

// One by one: the float32 copy is of a single parameter.
void Optimizer::step_widened(const Target& target, const std::optional<at::Tensor>& skip) {
  Target wide = target;
  wide.parameter = target.parameter.to(at::kFloat);
  if (wide.parameter.device().is_cpu()) {
    step_on_cpu({wide});
  } else {
    step_group_by_libtorch({wide}, skip);
  }
  at::Tensor(target.parameter).copy_(wide.parameter);
}

void Optimizer::step_group_by_libtorch(const std::vector<Target>& group, const std::optional<at::Tensor>& skip) {
  constexpr std::int64_t kCopied = std::int64_t{1} << 25;  // elements whose gradients are copied at a time
  std::vector<Target> batch;
  std::int64_t copied = 0;
  for (std::size_t i = 0; i < group.size(); ++i) {
    Target target = group[i];
    const at::Tensor& parameter = parameters_[target.index].tensor;
    if (masters_[target.index].defined()) {
      const at::Tensor& master = target.parameter;
      master.copy_(at::where(master.to(parameter.scalar_type()).ne(parameter), parameter.to(at::kFloat), master));
    }
    if (widens(target.parameter) || target.grad.scalar_type() != target.parameter.scalar_type()) {
      target.grad = target.grad.to(at::kFloat);
    }
    if (target.grad_factor != 1) target.grad = target.grad.mul(target.grad_factor);
    if (target.grad_factor_tensor.defined()) target.grad = scaled(target.grad, target.grad_factor_tensor);
    if (!target.grad.is_same(parameter.grad())) copied += target.grad.numel();
    batch.push_back(std::move(target));
    if (copied < kCopied && i + 1 < group.size()) continue;
    step_by_libtorch(batch, skip);
    batch.clear();
    copied = 0;
  }
}

void Optimizer::step_part(const Target& target, std::size_t number, std::int64_t first, std::int64_t count,
                          const Part& body) {
  const at::ScalarType dtype = target.grad.scalar_type();
  const auto* grad = static_cast<const char*>(target.grad.const_data_ptr()) + first * target.grad.itemsize();
  if (dtype == at::kFloat && target.grad_factor == 1 && !target.narrow.defined()) {
    return body(number, first, static_cast<std::size_t>(count), reinterpret_cast<const float*>(grad));
  }
  constexpr std::int64_t kTile = 2048;  // its float32 gradient stays in the first cache
  float widened[kTile];
  const auto factor = static_cast<float>(target.grad_factor);
  for (std::int64_t done = 0; done < count; done += kTile) {
    const auto elements = static_cast<std::size_t>(std::min(kTile, count - done));
    const auto* values = grad + done * target.grad.itemsize();
    if (dtype == at::kFloat) {
      std::memcpy(widened, values, elements * sizeof(float));
    } else {
      widen(dtype, elements, values, widened);
    }
    if (factor != 1) multiply(elements, widened, factor);
    if (!target.narrow.defined()) {
      body(number, first + done, elements, widened);
      continue;
    }
    auto* narrowed = static_cast<char*>(target.narrow.mutable_data_ptr()) + (first + done) * target.narrow.itemsize();
    float* master = target.parameter.mutable_data_ptr<float>() + first + done;
    adopt_changes(target.narrow.scalar_type(), elements, narrowed, master);
    body(number, first + done, elements, widened);
    narrow(target.narrow.scalar_type(), elements, master, narrowed);
  }
}

void Optimizer::for_each_part(const std::vector<Target>& targets, const Part& body) {
  constexpr std::int64_t kPart = 16384;  // elements: enough to hide a call, few enough to share evenly
  struct Range {
    std::size_t number;
    std::int64_t first, count;
  };
  std::vector<Range> ranges;
  for (std::size_t number = 0; number < targets.size(); ++number) {
    const std::int64_t elements = targets[number].parameter.numel();
    for (std::int64_t first = 0; first < elements; first += kPart) {
      ranges.push_back({number, first, std::min(kPart, elements - first)});
    }
  }
  at::parallel_for(0, static_cast<std::int64_t>(ranges.size()), /*grain_size=*/2,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       const auto& range = ranges[static_cast<std::size_t>(i)];
                       step_part(targets[range.number], range.number, range.first, range.count, body);
                     }
                   });
}

void Optimizer::zero_grad() {
  for (auto& [name, tensor, shard] : parameters_) tensor.mutable_grad().reset();
}

std::vector<at::Tensor> Optimizer::zeros_like_parameters(std::optional<c10::ScalarType> type) const {
  const at::NoGradGuard no_grad;
  const observe::MemoryScope scope(observe::MemoryCategory::optimizer);
  std::vector<at::Tensor> result;
  result.reserve(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& like = masters_[i].defined() ? masters_[i] : parameters_[i].tensor;
    const bool has_own_type = like.scalar_type() != at::kFloat && !is_16_bit(like.scalar_type());
    const at::ScalarType wide = is_16_bit(like.scalar_type()) ? at::kFloat : like.scalar_type();
    const auto layout = storage_.row_major ? at::MemoryFormat::Contiguous : at::MemoryFormat::Preserve;
    result.push_back(at::zeros_like(like, like.options().dtype(has_own_type || !type ? wide : *type), layout));
  }
  return result;
}

void Optimizer::collect_elements(TrainState& state, const std::vector<at::Tensor>& tensors,
                                 const std::string& what) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    state.tensors.push_back({"optimizer." + parameters_[i].name + "." + what, tensors[i],
                             shard_of_state(parameters_[i].shard, tensors[i])});
  }
}

void Optimizer::collect_masters(TrainState& state) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!masters_[i].defined()) continue;
    state.tensors.push_back({"optimizer." + parameters_[i].name + ".master", masters_[i],
                             shard_of_state(parameters_[i].shard, masters_[i])});
  }
}

void Optimizer::collect_replicated(TrainState& state, const std::vector<at::Tensor>& tensors,
                                   const std::string& what) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    state.tensors.push_back({"optimizer." + parameters_[i].name + "." + what, tensors[i]});
  }
}

}  // namespace phalanx
