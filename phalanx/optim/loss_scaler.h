// LossScaler: training in float16, whose smallest numbers are too large for many gradients, by way of a larger loss.
//
// The loss is multiplied by a scale before backward(), so the gradients come out that much larger; the optimizer's step
// takes the factor off again, together with the clipping, on the way from the gradient to the moments (in float32 where
// a 16-bit parameter has its master), so nothing is rounded to float16 in between. A step whose gradients are not
// finite is skipped and the scale lowered; after growth_interval steps without one it is raised. The rules and the
// numbers are those of torch.amp.GradScaler.
//
// Contract
// - Whether a step is skipped follows from the norm alone, which has the same bits on every rank of the communicator
//   (grad_norm.h): all ranks skip, or none, and their scales stay equal without another message.
// - The gradients are left as backward() made them: scaled, not clipped.
// - Options that make no sense are a ConfigError. A scale that falls below the smallest one is an Error: gradients that
//   are not finite at any scale come from the model.
// - The state is two tensors of one element, "loss_scaler.scale" and "loss_scaler.good_steps"; loading fills them.
//
//   LossScaler scaler;
//   scaler.scaled(loss).backward();
//   const auto result = scaler.step(optimizer, lr, {.max_norm = 1.0, .comm = world.get()});
//   optimizer.zero_grad();
//   log(result.norm, result.stepped);
#pragma once

#include <cstdint>
#include <limits>

#include "phalanx/optim/optimizer.h"

namespace phalanx {

class Communicator;

struct LossScalerOptions {
  double initial_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;  // steps
  double smallest_scale = 0x1p-14;
};

class LossScaler {
 public:
  explicit LossScaler(LossScalerOptions options = {});

  /// The loss times the scale; differentiable.
  at::Tensor scaled(const at::Tensor& loss) const;

  struct StepOptions {
    double max_norm = std::numeric_limits<double>::infinity();  // positive; infinity: no clipping
    Communicator* comm = nullptr;                               // as grad_norm()'s
  };
  struct Result {
    bool stepped = false;
    double norm = 0;   // of the gradients without the scale, before clipping; not finite where the step was skipped
    double scale = 0;  // that these gradients were made with
  };
  /// Steps the optimizer, or skips the step, and sets the scale for the next one. Waits for the device.
  Result step(Optimizer& optimizer, double lr, StepOptions options);

  double scale() const;
  void collect_state(TrainState& state) const;

 private:
  LossScalerOptions options_;
  at::Tensor scale_, good_steps_;  // float64 and int64 on the CPU: what a checkpoint loads
};

}  // namespace phalanx
