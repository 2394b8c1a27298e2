#include "phalanx/optim/weight_average.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/where.h>
#include <fmt/format.h>

#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/optim/step_kernels.h"
#include "phalanx/optim/widen.h"

namespace phalanx {

WeightAverage::WeightAverage(std::vector<NamedTensor> parameters, WeightAverageOptions options)
    : parameters_(std::move(parameters)), options_(options) {
  if (!(options_.decay >= 0 && options_.decay < 1)) {
    throw ConfigError(fmt::format("average of weights: decay is {}: expected 0 <= decay < 1", options_.decay));
  }
  if (options_.update_every < 1) {
    throw ConfigError(fmt::format("average of weights: update_every is {}: expected 1 or more", options_.update_every));
  }
  const at::NoGradGuard no_grad;
  const observe::MemoryScope scope(observe::MemoryCategory::optimizer);
  for (const auto& [name, tensor, shard] : parameters_) {
    if (is_16_bit(tensor.scalar_type())) {
      throw Error(fmt::format("average of weights: parameter '{}' has dtype {}: expected float32 or float64", name,
                              c10::toString(tensor.scalar_type())));
    }
    averages_.push_back(at::empty_like(tensor).copy_(tensor));
  }
}

void WeightAverage::update(std::int64_t step, const at::Tensor& skip) {
  if (step <= options_.start_step) {
    blend(1, skip);
  } else if ((step - options_.start_step) % options_.update_every == 0) {
    blend(1 - options_.decay, skip);
  }
}

void WeightAverage::blend(double weight, const at::Tensor& skip) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor &average = averages_[i], &parameter = parameters_[i].tensor;
    const bool is_plain = parameter.device().is_cpu() && parameter.scalar_type() == at::kFloat && !skip.defined() &&
                          parameter.is_non_overlapping_and_dense() && parameter.strides() == average.strides();
    if (weight == 1 && !skip.defined()) {
      average.copy_(parameter);
    } else if (is_plain) {
      constexpr std::int64_t kGrain = 16384;
      at::parallel_for(0, parameter.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
        average_step(static_cast<float>(weight), static_cast<std::size_t>(end - begin),
                     parameter.const_data_ptr<float>() + begin, average.mutable_data_ptr<float>() + begin);
      });
    } else {
      const at::Tensor next = at::lerp(average, parameter, weight);
      average.copy_(skip.defined() ? at::where(skip.ne(0), average, next) : next);
    }
  }
}

void WeightAverage::swap() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor average = averages_[i].clone();
    averages_[i].copy_(parameters_[i].tensor);
    parameters_[i].tensor.copy_(average);
  }
}

void WeightAverage::collect_state(TrainState& state) const {
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    state.tensors.push_back({"ema." + parameters_[i].name, averages_[i], parameters_[i].shard});
  }
}

}  // namespace phalanx
