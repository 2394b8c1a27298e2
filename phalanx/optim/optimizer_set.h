// OptimizerSet: several optimizers, each of its own parameters, as one.
//
//   std::vector<std::unique_ptr<Optimizer>> members;
//   members.push_back(std::make_unique<Muon>(matrices));
//   members.push_back(std::make_unique<AdamW>(others));
//   OptimizerSet optimizer(std::move(members));
//   optimizer.step(lr);                                    // each with its own factors of the rate
#pragma once

#include <memory>
#include <vector>

#include "phalanx/optim/optimizer.h"

namespace phalanx {

class OptimizerSet final : public Optimizer {
 public:
  /// Throws Error for a parameter that two members have.
  explicit OptimizerSet(std::vector<std::unique_ptr<Optimizer>> members);
  void step(double lr, StepOptions options = {}) override;
  bool scales_gradients_itself() const override;
  void collect_state(TrainState& state) const override;

 private:
  // The members step.
  void step_on_cpu(const std::vector<Target>& /*targets*/) override {}
  void step_by_libtorch(const std::vector<Target>& /*targets*/, const std::optional<at::Tensor>& /*skip*/) override {}

  std::vector<std::unique_ptr<Optimizer>> members_;
};

}  // namespace phalanx
