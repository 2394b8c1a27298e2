#include "phalanx/nn/dropout.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/philox.h"

namespace phalanx::nn {

Dropout::Dropout(double probability) : Module("Dropout"), probability_(probability) {
  if (!(probability >= 0 && probability < 1)) {
    throw ConfigError(fmt::format("dropout: the probability is {}: expected 0 <= probability < 1", probability));
  }
}

void Dropout::rng_state(std::string layer, const DropoutRngState& rng_state) {
  layer_ = std::move(layer);
  rng_state_ = rng_state;
}

at::Tensor Dropout::forward(const at::Tensor& x) {
  if (!is_training() || probability_ == 0 || x.numel() == 0) return x;
  if (!rng_state_) {
    throw Error(
        "dropout: nobody has said where in the run this forward pass is: call nn::set_dropout_rng_state(model, {.seed "
        "= ..., .step = ...}) before each training step, or model.eval() to evaluate");
  }
  // Each step has its own streams, and within a step each layer, by name (stream_key()).
  const std::uint64_t seed = PhiloxStream(rng_state_->seed, static_cast<std::uint64_t>(rng_state_->step)).next_u64();
  const at::Tensor mask = at::empty(x.sizes(), at::TensorOptions(at::kFloat).device(x.device()));
  Box box{std::vector<std::int64_t>(static_cast<std::size_t>(x.dim()), 0), x.sizes().vec()};
  std::vector<std::int64_t> whole = x.sizes().vec();
  const auto dim = static_cast<std::size_t>(split_.dim < 0 ? split_.dim + x.dim() : split_.dim);
  box.offsets.at(dim) = whole.at(dim) * split_.part;
  whole[dim] *= split_.parts;
  box.offsets[0] += rng_state_->first_row;
  whole[0] += rng_state_->first_row;
  fill_box(mask, Init::uniform(0.0, 1.0), seed, layer_, box, whole);
  mask.ge_(probability_).mul_(1.0 / (1.0 - probability_));
  return x.mul(mask.to(x.scalar_type()));
}

void set_dropout_rng_state(torch::nn::Module& model, const DropoutRngState& rng_state) {
  if (auto* dropout = dynamic_cast<Dropout*>(&model)) dropout->rng_state("", rng_state);
  for (const auto& module : model.named_modules("", /*include_self=*/false)) {
    if (auto* dropout = dynamic_cast<Dropout*>(module.value().get())) dropout->rng_state(module.key(), rng_state);
  }
}

}  // namespace phalanx::nn
