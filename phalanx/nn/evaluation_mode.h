// Switches modules to evaluation mode, in which dropout leaves out nothing, and back: each with all its submodules to
// the mode that it had itself. The modules must outlive it.
//
//   const EvaluationMode evaluating(model.modules());
#pragma once

#include <utility>
#include <vector>

#include "phalanx/nn/module.h"

namespace phalanx::nn {

class EvaluationMode {
 public:
  explicit EvaluationMode(const std::vector<nn::Module*>& modules) {
    for (nn::Module* module : modules) {
      were_training_.emplace_back(module, module->is_training());
      module->eval();
    }
  }
  ~EvaluationMode() {
    for (const auto& [module, was_training] : were_training_) module->train(was_training);
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  std::vector<std::pair<nn::Module*, bool>> were_training_;
};

}  // namespace phalanx::nn
