// StageGradients: decides when the parameters of a rank's stages have their gradients, and sums the gradients of
// parameters that stages share.
//
// In a step, every micro-batch contributes to a gradient. grad_ready (tensor/grad_ready.h) is held back until the last
// contribution is in, and then fires once per step. If the stage's layers are Phalanx layers that defer weight
// gradients, it fires while the last ones are computed; otherwise right after.
// - A parameter that several stages of this rank use waits for all of them.
// - A parameter with copies on several stages (one name on several of them) waits for the end of the step. Then the
//   copies' gradients are summed in the order of stages, so that each copy gets the same bits.
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
  /// Collective: the ranks exchange the names of their stages' parameters. Throws if one name has two shapes.
  StageGradients(const std::vector<PipelineStage>& stages, std::shared_ptr<Communicator> comm);

  void begin_step();
  /// Call before the last weight gradients of the stage, after its last input gradients.
  void before_last(int stage);
  /// Fires the events that have not fired yet. Throws if a listener waits for a gradient that did not come.
  void after_last(int stage);
  /// Collective among the ranks that have copies of a parameter.
  void reduce_tied_gradients();
  /// Call it also after an error.
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
    int stage = 0, rank = 0, parameter = 0;  // parameter: its index on that rank
  };
  struct TiedParameter {
    std::string name;
    std::vector<Copy> all;  // by stage
  };
  void find_tied_parameters();
  void fire(Parameter& parameter);

  std::shared_ptr<Communicator> comm_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<TiedParameter> tied_;  // those of which this rank has a copy, by name
};

}  // namespace phalanx
