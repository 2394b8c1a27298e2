// AdamW: Adam with decoupled weight decay, one fused pass over parameter, gradient and both moments.
//
//   p    <- p - lr * weight_decay * p
//   m    <- beta1 m + (1 - beta1) g
//   v    <- beta2 v + (1 - beta2) g^2
//   p    <- p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
//
// State per parameter: exp_avg (m), exp_avg_sq (v) and step (t, a 0-dim float32 on the parameter's device).
// See optimizer.h for the contract.
#pragma once

#include "phalanx/optim/optimizer.h"

namespace phalanx {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  std::vector<std::string> no_decay;   // patterns of names that do not decay: {"*norm*", "*.bias"}; name_patterns.h
  std::vector<ParameterGroup> groups;  // with rates or weight decays of their own; parameter_groups.h
  bool master_weights = true;          // of 16-bit parameters; see optimizer.h
};

class AdamW final : public Optimizer {
 public:
  explicit AdamW(std::vector<NamedTensor> parameters, AdamWOptions options = {});
  bool scales_gradients_itself() const override;
  void collect_state(TrainState& state) const override;
  const AdamWOptions& options() const noexcept { return options_; }

 private:
  void step_on_cpu(const std::vector<Target>& targets) override;
  void step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) override;
  bool step_by_gpu_kernel(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) override;

  AdamWOptions options_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_, steps_;
};

}  // namespace phalanx
