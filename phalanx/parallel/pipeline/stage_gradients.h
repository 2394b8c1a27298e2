// StageGradients: when the parameters of a rank's stages have their gradients, and what is done about those that stages
// share.
//
// In a step every micro-batch brings a part of a gradient. grad_ready (tensor/grad_ready.h) is held back until the last
// one is in, and comes once a step then: while the stage's last weight gradients are being computed, where layers of
// ours defer them, else right after. A parameter that several stages of this rank use waits for all of them; one that
// has copies on several stages (one name on several of them) waits for the end of the step, when the copies' gradients
// have been added up, in the order of stages, the same bits for each.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/parallel/pipeline/stage.h"
#include "phalanx/tensor/grad_ready.h"

namespace phalanx {

class StageGradients {
 public:
  /// Collective: the ranks tell each other which names their stages have. Throws where a name stands for two shapes.
  StageGradients(const std::vector<PipelineStage>& stages, std::shared_ptr<Communicator> comm);

  void begin_step();
  /// Before the last weight gradients of the stage, once those of its inputs are through.
  void before_last(int stage);
  /// Fires what has not been fired. Throws where somebody waits for a gradient that did not come.
  void after_last(int stage);
  /// Collective among the ranks that have copies of a parameter.
  void reduce_tied_gradients();
  /// Also after an error.
  void end_step();

  /// Names of parameters that have copies on several stages.
  std::vector<std::string> tied_names() const;

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    std::vector<int> stages;  // of this rank
    std::size_t stages_left = 0;
    bool is_tied = false, is_fired = false;
    GradReadySubscription subscription;
    std::unique_ptr<GradReadyHold> hold;
  };
  struct Copy {
    int stage = 0, rank = 0, parameter = 0;  // its number on that rank
  };
  struct TiedParameter {
    std::string name;
    std::vector<Copy> all;  // by stage
  };
  void find_tied_parameters();
  void fire(Parameter& parameter);

  std::shared_ptr<Communicator> comm_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<TiedParameter> tied_;  // of which this rank has one, by name
};

}  // namespace phalanx
