// LossScaler: loss scaling for training in float16, where many gradients are too small to be represented.
//
// The loss is multiplied by a scale before backward(), so the gradients are larger by that factor. The optimizer's step
// removes the factor, together with the clipping, between the gradient and the moments (in float32 if a 16-bit
// parameter has a master). So nothing is rounded to float16 in between. A step whose gradients are not finite is
// skipped, and the scale is lowered. After growth_interval steps without a skip the scale is raised. The rules and the
// numbers are those of torch.amp.GradScaler.
//
// Contract
// - Whether a step is skipped depends only on the norm, which has the same bits on every rank of the communicator
//   (grad_norm.h). So all ranks skip or none, and their scales stay equal without further communication.
// - The gradients stay as backward() made them: scaled, not clipped.
// - A scaler made for a device keeps its state there. step_on_device() then decides there, too, by the same rules in
//   float64, and the host reads nothing. step() and scale() wait for the device.
// - Invalid options throw ConfigError. A scale that falls below the smallest one throws Error: gradients that are not
//   finite at any scale come from the model.
// - The state is two tensors of one element, "loss_scaler.scale" and "loss_scaler.good_steps". Loading fills them.
//
//   LossScaler scaler;
//   scaler.scaled(loss).backward();
//   const auto result = scaler.step(optimizer, lr, {.max_norm = 1.0, .comm = world.get()});
//   optimizer.zero_grad();
//   print(result.norm, result.stepped);
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
  /// `device`: where the parameters are, or the CPU.
  explicit LossScaler(LossScalerOptions options = {}, at::Device device = at::kCPU);

  /// The loss times the scale; differentiable.
  at::Tensor scaled(const at::Tensor& loss) const;

  struct StepOptions {
    double max_norm = std::numeric_limits<double>::infinity();  // positive; infinity: no clipping
    Communicator* comm = nullptr;                               // as in grad_norm()
    at::Tensor skip = {};  // for step_on_device(): 0-dim bool on the device; true: skip whatever the gradients are
  };
  struct Result {
    bool stepped = false;
    double norm = 0;   // of the unscaled gradients, before clipping; not finite if the step was skipped
    double scale = 0;  // the scale of these gradients
  };
  /// Steps the optimizer, or skips the step, and sets the scale for the next one. Waits for the device.
  Result step(Optimizer& optimizer, double lr, const StepOptions& options);

  /// 0-dim float64 tensors on the device, as in Result. `stepped` is 1 or 0.
  struct DeviceResult {
    at::Tensor stepped, norm, scale, next_scale;
  };
  /// As step(), without a wait. The scale stays where it is at the smallest one: check with require_scale_left().
  /// REQUIRES: a scaler made for the device of the parameters.
  DeviceResult step_on_device(Optimizer& optimizer, double lr, const StepOptions& options);
  /// Throws Error if the step was skipped at a scale that cannot be lowered any more.
  void require_scale_left(const Result& result) const;

  double scale() const;
  const at::Tensor& scale_tensor() const { return scale_; }  // 0-dim float64; steps change it in place
  void collect_state(TrainState& state) const;

 private:
  void update_on_device(const at::Tensor& skip);

  LossScalerOptions options_;
  at::Tensor scale_, good_steps_;  // 0-dim float64 and int64: what a checkpoint loads
};

}  // namespace phalanx
