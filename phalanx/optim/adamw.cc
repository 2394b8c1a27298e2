#include "phalanx/optim/adamw.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/optim/step_kernels.h"
#include "phalanx/optim/stochastic_rounding.h"
#include "phalanx/optim/widen.h"
#include "phalanx/tensor/counter_fill.h"

namespace phalanx {
namespace {

void require_in_unit_interval(const char* what, double value) {
  if (!(value >= 0 && value < 1))
    throw ConfigError(fmt::format("AdamW: {} is {}: expected 0 <= {} < 1", what, value, what));
}

bool keeps_16_bits(const AdamWOptions& options) {
  return !options.master_weights || options.state_dtype != c10::ScalarType::Float;
}

/// Calls body(number of elements before, first index in the global tensor, count) for each range of elements
/// [first, first + count) of a part that consists of `ranges`.
template <class Body>
void for_each_range(const std::vector<FlatRange>& ranges, std::int64_t first, std::int64_t count, const Body& body) {
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t length = ranges.front().length, at = first + done;
    const std::int64_t within = at % length, part = std::min(length - within, count - done);
    body(done, ranges[static_cast<std::size_t>(at / length)].begin + within, part);
    done += part;
  }
}

}  // namespace

AdamW::AdamW(std::vector<NamedTensor> parameters, AdamWOptions options)
    : Optimizer(std::move(parameters),
                {.master_weights = options.master_weights, .widens = true, .row_major = keeps_16_bits(options)}),
      options_(std::move(options)) {
  require_in_unit_interval("beta1", options_.beta1);
  require_in_unit_interval("beta2", options_.beta2);
  if (!(options_.eps > 0)) throw ConfigError(fmt::format("AdamW: eps is {}: expected a positive number", options_.eps));
  set_groups("AdamW", options_.weight_decay, options_.no_decay, options_.groups);
  if (options_.state_dtype != at::kFloat && options_.state_dtype != at::kBFloat16) {
    throw ConfigError(
        fmt::format("AdamW: state_dtype is {}: expected Float or BFloat16", c10::toString(options_.state_dtype)));
  }
  exp_avg_ = zeros_like_parameters(options_.state_dtype);
  exp_avg_sq_ = zeros_like_parameters(options_.state_dtype);
  for (const auto& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    if (options_.stochastic_rounding && keeps_16_bits(options_)) {
      if (tensor.scalar_type() == at::kHalf && !options_.master_weights) {
        throw ConfigError(
            fmt::format("AdamW: stochastic_rounding is for bfloat16, but parameter '{}' is Half and has no master: set "
                        "master_weights, or not stochastic_rounding",
                        parameter.name));
      }
      roundings_.push_back(rounding_of(parameter, options_.seed));
    }
    steps_.push_back(at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(tensor.device())));
  }
}

AdamW::Rounding AdamW::rounding_of(const NamedTensor& parameter, std::uint64_t seed) {
  const auto stream = [&](const char* what) {
    return stream_key(seed, fmt::format("rounding of {}{}", parameter.name, what));
  };
  Rounding rounding{.parameter = stream(""), .exp_avg = stream(".exp_avg"), .exp_avg_sq = stream(".exp_avg_sq")};
  const std::vector<std::int64_t> shape = parameter.global_shape();
  const Box whole{std::vector<std::int64_t>(shape.size(), 0), shape};
  rounding.ranges = flat_ranges(parameter.shard ? parameter.shard->box() : whole, shape);
  const auto& ranges = rounding.ranges;
  rounding.stride = ranges.size() > 1 ? ranges[1].begin - ranges[0].begin : 0;
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin - ranges[i - 1].begin != *rounding.stride) rounding.stride.reset();
    if (!rounding.stride) break;
  }
  if (!rounding.stride) {  // several dimensions are cut
    std::vector<std::int64_t> begins;
    for (const FlatRange& one : ranges) begins.push_back(one.begin);
    rounding.begins = at::tensor(begins, at::TensorOptions(at::kLong)).to(parameter.tensor.device());
  }
  return rounding;
}

bool AdamW::has_narrow_numbers(const Target& target) const {
  return is_16_bit(target.parameter.scalar_type()) || is_16_bit(exp_avg_[target.index].scalar_type());
}

void AdamW::step_narrow(const AdamWStep& step, float number, const Target& target, std::int64_t first,
                        std::size_t count, const float* grad) {
  constexpr std::size_t kTile = 1024;  // in the first cache
  struct Array {
    at::Tensor tensor;
    std::uint64_t stream;
    bool is_narrow;
    RoundingKey key = {};
    float wide[kTile];
    char* data(std::int64_t at) const {
      return static_cast<char*>(tensor.mutable_data_ptr()) + at * static_cast<std::int64_t>(tensor.itemsize());
    }
    float* load(std::int64_t at, std::size_t elements) {
      if (!is_narrow) return reinterpret_cast<float*>(data(at));
      widen(tensor.scalar_type(), elements, data(at), wide);
      return wide;
    }
  };
  const Rounding* const rounding = roundings_.empty() ? nullptr : &roundings_[target.index];
  const auto array = [&](const at::Tensor& tensor, std::uint64_t Rounding::*stream) {
    Array one{
        .tensor = tensor, .stream = rounding ? rounding->*stream : 0, .is_narrow = is_16_bit(tensor.scalar_type())};
    if (rounding) one.key = rounding_key(one.stream, static_cast<std::uint64_t>(number));
    return one;
  };
  Array arrays[] = {array(target.parameter, &Rounding::parameter), array(exp_avg_[target.index], &Rounding::exp_avg),
                    array(exp_avg_sq_[target.index], &Rounding::exp_avg_sq)};
  for (std::size_t done = 0; done < count; done += kTile) {
    const std::size_t elements = std::min(kTile, count - done);
    const std::int64_t at = first + static_cast<std::int64_t>(done);
    float* const parameter = arrays[0].load(at, elements);
    float* const exp_avg = arrays[1].load(at, elements);
    adamw_step(step, elements, grad + done, parameter, exp_avg, arrays[2].load(at, elements));
    for (const Array& one : arrays) {
      if (!one.is_narrow) continue;
      if (!rounding) {
        narrow(one.tensor.scalar_type(), elements, one.wide, one.data(at));
        continue;
      }
      for_each_range(rounding->ranges, at, static_cast<std::int64_t>(elements),
                     [&](std::int64_t before, std::int64_t index, std::int64_t length) {
                       round_stochastically(one.key, static_cast<std::uint64_t>(index),
                                            static_cast<std::size_t>(length), one.wide + before,
                                            reinterpret_cast<std::uint16_t*>(one.data(at + before)));
                     });
    }
  }
}

void AdamW::step_on_cpu(const std::vector<Target>& targets) {
  std::vector<AdamWStep> steps;  // by target
  steps.reserve(targets.size());
  for (const auto& target : targets) {
    float& step = *steps_[target.index].mutable_data_ptr<float>();
    step += 1;
    steps.emplace_back(target.lr, options_.beta1, options_.beta2, options_.eps, target.weight_decay, step);
  }
  for_each_part(targets, [&](std::size_t number, std::int64_t first, std::size_t count, const float* grad) {
    const Target& target = targets[number];
    if (has_narrow_numbers(target)) {
      return step_narrow(steps[number], *steps_[target.index].const_data_ptr<float>(), target, first, count, grad);
    }
    adamw_step(steps[number], count, grad, target.parameter.mutable_data_ptr<float>() + first,
               exp_avg_[target.index].mutable_data_ptr<float>() + first,
               exp_avg_sq_[target.index].mutable_data_ptr<float>() + first);
  });
}

at::Tensor AdamW::indices_of(std::size_t parameter, std::int64_t first, std::int64_t count) const {
  const auto options = at::TensorOptions(steps_[parameter].device()).dtype(at::kLong);
  const std::vector<FlatRange>& ranges = roundings_[parameter].ranges;
  const at::Tensor local = at::arange(first, first + count, options);
  if (ranges.size() == 1) return local.add_(ranges.front().begin);
  const std::int64_t length = ranges.front().length;
  const at::Tensor range = local.div(length, "floor"), within = local.remainder(length);
  const Rounding& rounding = roundings_[parameter];
  if (rounding.stride) return range.mul_(*rounding.stride).add_(ranges.front().begin).add_(within);
  return rounding.begins.index_select(0, range).add_(within);
}

void AdamW::step_narrow_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) {
  constexpr std::int64_t kPiece = std::int64_t{1} << 22, kWidened = std::int64_t{1} << 24;  // elements
  struct Numbers {
    at::Tensor kept, wide;
    std::uint64_t Rounding::*stream;
  };
  struct Piece {
    std::size_t parameter;
    std::int64_t first;
    Numbers numbers[3];
  };
  std::vector<Piece> pieces;
  std::vector<at::Tensor> grads;
  std::int64_t widened = 0;
  const auto step = [&] {
    std::vector<at::Tensor> parameters, exp_avg, exp_avg_sq, steps;
    for (const Piece& piece : pieces) {
      parameters.push_back(piece.numbers[0].wide);
      exp_avg.push_back(piece.numbers[1].wide);
      exp_avg_sq.push_back(piece.numbers[2].wide);
      steps.push_back(steps_[piece.parameter]);
    }
    at::_fused_adamw_(parameters, grads, exp_avg, exp_avg_sq, /*max_exp_avg_sqs=*/{}, steps, targets.front().lr,
                      options_.beta1, options_.beta2, targets.front().weight_decay, options_.eps, /*amsgrad=*/false,
                      /*maximize=*/false,
                      /*grad_scale=*/{}, /*found_inf=*/skip);
    for (const Piece& piece : pieces) {
      at::Tensor indices;
      for (const Numbers& one : piece.numbers) {
        if (one.wide.scalar_type() == one.kept.scalar_type()) continue;  // stepped in place
        if (roundings_.empty()) {
          one.kept.copy_(one.wide);
          continue;
        }
        if (!indices.defined()) indices = indices_of(piece.parameter, piece.first, one.kept.numel());
        const std::uint64_t stream = roundings_[piece.parameter].*one.stream;
        one.kept.copy_(round_stochastically(stream, steps_[piece.parameter], indices, one.wide));
      }
    }
    pieces.clear();
    grads.clear();
    widened = 0;
  };
  for (const Target& target : targets) {
    for (std::int64_t first = 0; first < target.parameter.numel(); first += kPiece) {
      const std::int64_t count = std::min(kPiece, target.parameter.numel() - first);
      const auto part = [&](const at::Tensor& tensor) { return tensor.view({-1}).narrow(0, first, count); };
      const auto numbers = [&](const at::Tensor& tensor, std::uint64_t Rounding::*stream) {
        const at::Tensor kept = part(tensor);
        return Numbers{.kept = kept, .wide = kept.to(at::kFloat), .stream = stream};
      };
      pieces.push_back({.parameter = target.index,
                        .first = first,
                        .numbers = {numbers(target.parameter, &Rounding::parameter),
                                    numbers(exp_avg_[target.index], &Rounding::exp_avg),
                                    numbers(exp_avg_sq_[target.index], &Rounding::exp_avg_sq)}});
      grads.push_back(part(target.grad));
      if ((widened += count) >= kWidened) step();
    }
  }
  if (!pieces.empty()) step();
}

void AdamW::step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) {
  std::vector<at::Tensor> parameters, grads, exp_avg, exp_avg_sq, steps, all_steps;
  std::vector<Target> narrow;
  for (const auto& target : targets) {
    all_steps.push_back(steps_[target.index]);
    if (has_narrow_numbers(target)) {
      narrow.push_back(target);
      continue;
    }
    parameters.push_back(target.parameter);
    grads.push_back(target.grad);
    exp_avg.push_back(exp_avg_[target.index]);
    exp_avg_sq.push_back(exp_avg_sq_[target.index]);
    steps.push_back(steps_[target.index]);
  }
  if (skip) {
    at::_foreach_add_(all_steps, skip->neg().add_(1));
  } else {
    at::_foreach_add_(all_steps, 1);
  }
  if (!narrow.empty()) step_narrow_by_libtorch(narrow, skip);
  if (parameters.empty()) return;
  at::_fused_adamw_(parameters, grads, exp_avg, exp_avg_sq, /*max_exp_avg_sqs=*/{}, steps, targets.front().lr,
                    options_.beta1, options_.beta2, targets.front().weight_decay, options_.eps, /*amsgrad=*/false,
                    /*maximize=*/false,
                    /*grad_scale=*/{}, /*found_inf=*/skip);
}

bool AdamW::scales_gradients_itself() const {
  return options_.state_dtype == at::kFloat && std::ranges::all_of(parameters_, [](const NamedTensor& parameter) {
           const at::Tensor& tensor = parameter.tensor;
           return tensor.scalar_type() == at::kFloat && kernels::gpu_kernels_on(tensor.device().type()) != nullptr;
         });
}

bool AdamW::step_by_gpu_kernel(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) {
  namespace gpu = kernels::gpu;
  const auto launch = kernels::gpu_launch(targets.front().parameter);
  if (!launch || options_.state_dtype != at::kFloat) return false;
  std::map<gpu::Type, std::vector<gpu::AdamWTensor>> by_grad_type;
  std::vector<float*> steps;
  for (const Target& target : targets) {
    if (!kernels::is_gpu_type(target.grad)) return false;
    float* const step = steps_[target.index].mutable_data_ptr<float>();
    steps.push_back(step);
    by_grad_type[kernels::gpu_type(target.grad.scalar_type())].push_back(
        {target.parameter.numel(), target.parameter.mutable_data_ptr<float>(), target.grad.const_data_ptr(),
         exp_avg_[target.index].mutable_data_ptr<float>(), exp_avg_sq_[target.index].mutable_data_ptr<float>(),
         /*copy=*/nullptr, step});
  }
  const Target& first = targets.front();  // the factors are those of all
  at::Tensor factor = first.grad_factor_tensor;
  if (factor.defined()) factor = factor.to(at::kDouble).mul(first.grad_factor).to(at::kFloat);
  if (!factor.defined() && first.grad_factor != 1) {
    factor = at::full({}, first.grad_factor, first.parameter.options().dtype(at::kFloat));
  }
  const float* const skip_value = skip ? skip->const_data_ptr<float>() : nullptr;
  launch->check(
      "AdamW", launch->kernels().increment(launch->stream(), static_cast<int>(steps.size()), steps.data(), skip_value));
  for (const auto& [type, tensors] : by_grad_type) {
    const gpu::AdamWSettings settings = {.lr = first.lr,
                                         .beta1 = options_.beta1,
                                         .beta2 = options_.beta2,
                                         .eps = options_.eps,
                                         .weight_decay = first.weight_decay,
                                         .grad_type = type,
                                         .copy_type = gpu::Type::f32,
                                         .grad_scale = factor.defined() ? factor.const_data_ptr<float>() : nullptr,
                                         .skip = skip_value};
    launch->check(
        "AdamW", launch->kernels().adamw(launch->stream(), static_cast<int>(tensors.size()), tensors.data(), settings));
  }
  return true;
}

void AdamW::collect_state(TrainState& state) const {
  collect_elements(state, exp_avg_, "exp_avg");
  collect_elements(state, exp_avg_sq_, "exp_avg_sq");
  collect_replicated(state, steps_, "step");
  collect_masters(state);
}

}  // namespace phalanx
