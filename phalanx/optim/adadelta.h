// Adadelta: derives the step size from the sizes of gradients and of earlier steps (Zeiler, 2012). lr scales the step;
// the paper's value is 1.0.
//
//   g <- g + weight_decay * p
//   v <- rho v + (1 - rho) g^2
//   d <- sqrt(u + eps) / sqrt(v + eps) * g
//   u <- rho u + (1 - rho) d^2
//   p <- p - lr * d
//
// State per parameter: square_avg (v), acc_delta (u), as torch names them. See optimizer.h for the contract.
#pragma once

#include "phalanx/optim/optimizer.h"

namespace phalanx {

struct AdadeltaOptions {
  double rho = 0.9;
  double eps = 1e-6;
  double weight_decay = 0.0;
  std::vector<std::string> no_decay;   // patterns of names that do not decay: {"*norm*", "*.bias"}; name_patterns.h
  std::vector<ParameterGroup> groups;  // with rates or weight decays of their own; parameter_groups.h
  bool master_weights = true;          // of 16-bit parameters; see optimizer.h
};

class Adadelta final : public Optimizer {
 public:
  explicit Adadelta(std::vector<NamedTensor> parameters, AdadeltaOptions options = {});
  void collect_state(TrainState& state) const override;
  const AdadeltaOptions& options() const noexcept { return options_; }

 private:
  void step_on_cpu(const std::vector<Target>& targets) override;
  void step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) override;

  AdadeltaOptions options_;
  std::vector<at::Tensor> square_avg_, acc_delta_;
};

}  // namespace phalanx
