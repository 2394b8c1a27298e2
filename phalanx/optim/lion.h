// Lion: steps by the sign of a mean of gradients (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023).
//
//   c <- beta1 m + (1 - beta1) g
//   p <- p - lr * weight_decay * p
//   p <- p - lr * sign(c)            (sign(0) is 0, and of what is no number it is no number)
//   m <- beta2 m + (1 - beta2) g
//
// Every element moves by lr, so the paper takes a third to a tenth of AdamW's rate, and 3 to 10 times its weight decay.
// State per parameter: exp_avg (m), half of AdamW's. See optimizer.h for the contract.
//
//   Lion optimizer(nn::named_parameters(*model), {.weight_decay = 1.0});
//   optimizer.step(1e-4);
#pragma once

#include "phalanx/optim/optimizer.h"

namespace phalanx {

struct LionOptions {
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.0;
  std::vector<std::string> no_decay;   // patterns of names that do not decay: {"*norm*", "*.bias"}; name_patterns.h
  std::vector<ParameterGroup> groups;  // with rates or weight decays of their own; parameter_groups.h
  bool master_weights = true;          // of 16-bit parameters; see optimizer.h
};

class Lion final : public Optimizer {
 public:
  explicit Lion(std::vector<NamedTensor> parameters, LionOptions options = {});
  void collect_state(TrainState& state) const override;
  const LionOptions& options() const noexcept { return options_; }

 private:
  void step_on_cpu(const std::vector<Target>& targets) override;
  void step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) override;

  LionOptions options_;
  std::vector<at::Tensor> exp_avg_;
};

}  // namespace phalanx
