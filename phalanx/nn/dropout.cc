#include "phalanx/nn/dropout.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <utility>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx::nn {

Dropout::Dropout(double probability) : Module("Dropout"), probability_(probability) {
  if (!(probability >= 0 && probability < 1)) {
    throw ConfigError(fmt::format("dropout: the probability is {}: expected 0 <= probability < 1", probability));
  }
}

void Dropout::rng_state(std::string layer, const PlaceInRun& rng_state) {
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
  const at::Tensor mask = at::empty(x.sizes(), at::TensorOptions(at::kFloat).device(x.device()));
  Box box{std::vector<std::int64_t>(static_cast<std::size_t>(x.dim()), 0), x.sizes().vec()};
  std::vector<std::int64_t> whole = x.sizes().vec();
  const auto dim = static_cast<std::size_t>(split_.dim < 0 ? split_.dim + x.dim() : split_.dim);
  box.offsets.at(dim) = whole.at(dim) * split_.part;
  whole[dim] *= split_.parts;
  fill_in_run(mask, Init::uniform(0.0, 1.0), *rng_state_, layer_, std::move(box), std::move(whole));
  mask.ge_(probability_);
  return x.mul(mask.to(x.scalar_type())).mul(1.0 / (1.0 - probability_));  // as a number, which 16 bits do not round
}

void set_dropout_rng_state(torch::nn::Module& model, const PlaceInRun& rng_state) {
  if (auto* dropout = dynamic_cast<Dropout*>(&model)) dropout->rng_state("", rng_state);
  for (const auto& module : model.named_modules("", /*include_self=*/false)) {
    if (auto* dropout = dynamic_cast<Dropout*>(module.value().get())) dropout->rng_state(module.key(), rng_state);
  }
}

}  // namespace phalanx::nn
