#include "phalanx/train/model/preference_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "phalanx/base/error.h"

namespace phalanx::train {

models::DocumentLoss PreferenceLoss::of(const PreferenceBatch& batch) {
  if (!records_ && !batch.reference.defined()) throw Error("preferences: the reference's likelihoods are not known");
  return {.documents = batch.documents,
          .count = 2 * batch.pairs(),
          .of = [this, reference = batch.reference](const at::Tensor& log_likelihoods) {
            if (!records_) return value(log_likelihoods, reference);
            recorded_ = log_likelihoods.view({-1, 2});
            return models::DocumentLoss::Value{.loss = at::zeros({}, log_likelihoods.options()), .gradient = {}};
          }};
}

models::DocumentLoss::Value PreferenceLoss::value(const at::Tensor& log_likelihoods, const at::Tensor& reference) {
  const at::Tensor rewards = (log_likelihoods.view({-1, 2}) - reference) * settings_.beta;  // [pairs, 2]
  const at::Tensor chosen = rewards.select(1, 0), rejected = rewards.select(1, 1), margin = chosen - rejected;
  const at::Tensor sums = at::stack({chosen.sum(), rejected.sum(), margin.gt(0).sum().to(at::kDouble),
                                     at::full({}, static_cast<double>(rewards.size(0)), rewards.options())});
  sums_ = sums_.defined() ? sums_ + sums : sums;

  at::Tensor loss, by_margin;  // by_margin: [pairs], the loss's derivative
  if (settings_.loss_type == "hinge") {
    loss = margin.neg().add(1).clamp_min(0).sum();
    by_margin = margin.lt(1).to(at::kDouble).neg();
  } else {
    const double e = settings_.label_smoothing;
    loss = at::log_sigmoid(margin).mul(e - 1).sub(at::log_sigmoid(margin.neg()).mul(e)).sum();
    by_margin = margin.neg().sigmoid().mul(e - 1).add(margin.sigmoid(), e);
  }
  return {.loss = loss, .gradient = at::stack({by_margin, by_margin.neg()}, 1).mul(settings_.beta).flatten()};
}

PreferenceMetrics PreferenceLoss::metrics_of(const double* sums) {
  const double pairs = sums[3];
  if (pairs == 0) return {};
  return {.chosen = sums[0] / pairs, .rejected = sums[1] / pairs, .accuracy = sums[2] / pairs};
}

at::Tensor PreferenceLoss::likelihoods_of(const std::function<void()>& forward) {
  records_ = true;
  recorded_ = at::Tensor();
  try {
    forward();
  } catch (...) {
    records_ = false;
    throw;
  }
  records_ = false;
  return std::exchange(recorded_, at::Tensor());
}

}  // namespace phalanx::train
