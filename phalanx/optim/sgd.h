// SGD with optional momentum, Nesterov momentum and (coupled) weight decay, fused.
//
//   g <- g + weight_decay * p
//   b <- momentum * b + g            (b starts at zero, so the first step is a plain one)
//   p <- p - lr * (nesterov ? g + momentum * b : b)
//
// State per parameter: momentum_buffer (b), only where momentum > 0. See optimizer.h for the contract.
#pragma once

#include "phalanx/optim/optimizer.h"

namespace phalanx {

struct SgdOptions {
  double momentum = 0.0;
  double weight_decay = 0.0;
  std::vector<std::string> no_decay;   // patterns of names that do not decay: {"*norm*", "*.bias"}; name_patterns.h
  std::vector<ParameterGroup> groups;  // with rates or weight decays of their own; parameter_groups.h
  bool master_weights = true;          // of 16-bit parameters; see optimizer.h
  bool nesterov = false;
};

class Sgd final : public Optimizer {
 public:
  explicit Sgd(std::vector<NamedTensor> parameters, SgdOptions options = {});
  void collect_state(TrainState& state) const override;
  const SgdOptions& options() const noexcept { return options_; }

 private:
  void step_on_cpu(const std::vector<Target>& targets) override;
  void step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) override;

  SgdOptions options_;
  std::vector<at::Tensor> momentum_buffer_;
};

}  // namespace phalanx
