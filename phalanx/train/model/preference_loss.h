// PreferenceLoss: the loss of direct preference optimization ([dpo]), and what it says of the model's preferences.
//
// Of a pair with log-likelihoods c of the chosen and r of the rejected answer, and cr and rr of the reference, rewards
// are beta (c - cr) and beta (r - rr). With m their difference and e = label_smoothing the loss is
//
//   sigmoid   -(1 - e) log(sigmoid(m)) - e log(sigmoid(-m))
//   hinge     max(0, 1 - m)
//
// The model's loss of a step is the sum over its pairs, divided by the number of pairs of the global batch.
//
//   PreferenceLoss preferences(config.dpo);
//   const models::DocumentLoss of_batch = preferences.of(*batch.preferences);
//   at::Tensor loss =
//       model->loss(tokens, labels, {.documents = documents, .divisor = pairs, .document_loss = &of_batch});
//   preferences.take_sums();      // of all batches since
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>

#include "phalanx/config/config.h"
#include "phalanx/models/document_loss.h"
#include "phalanx/train/model/preference_batch.h"
#include "phalanx/train/model/preference_metrics.h"

namespace phalanx::train {

class PreferenceLoss {
 public:
  using Settings = config::TrainConfig::Dpo;
  explicit PreferenceLoss(const Settings& settings) : settings_(settings) {}

  /// REQUIRES: the batch has a reference, or likelihoods are being recorded; `batch` and this outlive the result.
  models::DocumentLoss of(const PreferenceBatch& batch);

  /// The sums of all pairs since the last call: float64 [kSums] on the device: of the rewards of chosen and of rejected
  /// answers, pairs whose chosen answer has the higher one, pairs. Undefined: this rank has computed no loss.
  at::Tensor take_sums() { return std::exchange(sums_, at::Tensor()); }
  static constexpr int kSums = 4;
  /// REQUIRES: kSums numbers. Zeros give zeros.
  static PreferenceMetrics metrics_of(const double* sums);

  /// The log-likelihoods of the documents of the one batch whose loss `forward` computes: float64 [pairs, 2] on the
  /// device. Undefined: this rank has not computed it.
  at::Tensor likelihoods_of(const std::function<void()>& forward);

 private:
  models::DocumentLoss::Value value(const at::Tensor& log_likelihoods, const at::Tensor& reference);

  Settings settings_;
  at::Tensor sums_, recorded_;
  bool records_ = false;
};

}  // namespace phalanx::train
