// Optimizer: the base class of AdamW, SGD, Lion, Adadelta, Muon and sets of them.
// It updates parameters from their gradients.
//
//   AdamW optimizer(nn::named_parameters(*model), {.weight_decay = 0.1});
//   loss.backward();
//   clip_grad_norm(optimizer.parameters(), 1.0);
//   optimizer.step(schedule.lr_at(step));
//   optimizer.zero_grad();
//
// Contract
// - Parameters are given with their fully qualified names. State is named by them ("optimizer.<fqn>.exp_avg"), never by
//   an index, so that a checkpoint survives a change of order. A name or a tensor given twice throws Error.
// - All state tensors exist from construction on. Loading a checkpoint fills them in place, before or after steps.
// - step(lr) updates every parameter whose gradient is defined. The others, and their state, do not change.
// - The arithmetic is element by element. For float32 on the CPU an element gets the same bits at any offset and
//   length, with any number of threads and on every instruction set. So a rank with a part of a parameter
//   (NamedTensor's shard) computes the same there as a rank with all of it. Other devices and dtypes use libtorch's
//   fused kernels: equal tensors get equal bits, but parts of them may differ in the last bit.
// - 16-bit parameters (bfloat16, float16) have a float32 master, "optimizer.<fqn>.master", and moments in float32. The
//   step updates the master, and the parameter is the master rounded. If other code has written the parameter (loaded
//   weights), the master takes over its values at the next step. Without masters (the options' master_weights) AdamW
//   computes in float32 and rounds each parameter (adamw.h). The others leave such parameters to libtorch's kernels,
//   which compute in the parameters' own precision; small updates are lost there.
// - Whether to step may be decided on the device: StepOptions::skip. The host reads nothing then.
// - A rank whose part is empty must step, too. Its gradient should be defined (and empty) wherever the other ranks'
//   are, because every rank counts the steps of each parameter.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/optim/parameter_groups.h"
#include "phalanx/tensor/named.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx {

struct StepOptions {
  double grad_factor = 1;  // multiplies every gradient during the step (in float32 if there is a master): loss_scaler.h
  /// The following are 0-dim tensors on the parameters' device. The step reads them when the device is there.
  at::Tensor grad_factor_tensor = {};  // one more factor; undefined: none
  at::Tensor skip = {};                // float32; 1: parameters and state stay as they are; 0 or undefined: step
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Throws Error if a gradient's shape or device is not its parameter's, or if an option's tensor is not a 0-dim
  /// tensor on the parameters' device.
  /// ENSURES: after that Error nothing has been updated.
  /// A parameter's rate is `lr` times its group's factor (parameter_groups.h).
  virtual void step(double lr, StepOptions options = {});
  /// Whether step() multiplies gradients by StepOptions::grad_factor_tensor in its own kernel, without a copy of them.
  virtual bool scales_gradients_itself() const { return false; }
  /// Appends handles to the state under "optimizer.<fqn>.<what>".
  virtual void collect_state(TrainState& state) const = 0;

  /// Makes every gradient undefined: the next backward pass writes it instead of adding to zeros.
  void zero_grad();
  const std::vector<NamedTensor>& parameters() const noexcept { return parameters_; }

 protected:
  struct Storage {
    bool master_weights = true;
    bool widens = false;     // the subclass steps 16-bit parameters without a master itself, in float32
    bool row_major = false;  // whatever the parameters' memory layout: state, and what a step works on
  };
  /// Throws on an empty list, an undefined or integer tensor, names or tensors given twice, and a tensor without its
  /// shard's shape.
  Optimizer(std::vector<NamedTensor> parameters, Storage storage);
  /// `who` begins the error messages. Throws what settings_by_name() does (parameter_groups.h).
  void set_groups(const std::string& who, double weight_decay, const std::vector<std::string>& no_decay,
                  const std::vector<ParameterGroup>& groups);

  /// What one step works on for parameter `index`: the parameter or its master, its gradient, and, on the CPU if there
  /// is a master, the 16-bit values. All are dense and in the memory layout of the state.
  struct Target {
    std::size_t index = 0;
    at::Tensor parameter, grad, narrow;
    double lr = 0;  // of this parameter
    double weight_decay = 0;
    double grad_factor = 1;
    at::Tensor grad_factor_tensor;
  };
  /// Called first, with all targets of a step, in the parameters' order. It may replace their gradients, rates and
  /// factors. `skip`: as StepOptions say, unless the host knows it.
  virtual void prepare(std::vector<Target>& /*targets*/, const std::optional<at::Tensor>& /*skip*/) {}
  /// One step of these targets, all on the CPU and float32, or 16-bit if it `widens`. for_each_part() supplies their
  /// gradients in float32.
  virtual void step_on_cpu(const std::vector<Target>& targets) = 0;
  /// One step of these targets by libtorch's operators. All have one device, dtype, rate and weight decay.
  /// `skip`: as StepOptions say.
  virtual void step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) = 0;

  /// One step of these targets, all float32 without a master on one device, by Phalanx's own kernel. False, and nothing
  /// done, if there is none.
  virtual bool step_by_gpu_kernel(const std::vector<Target>& /*targets*/, const std::optional<at::Tensor>& /*skip*/) {
    return false;
  }

  /// Calls body(target's number, first element, count, their gradient) for parts of all targets, on several threads.
  using Part = std::function<void(std::size_t number, std::int64_t first, std::size_t count, const float* grad)>;
  static void for_each_part(const std::vector<Target>& targets, const Part& body);

  /// One tensor of zeros like each parameter, or its master, in its memory layout. `type`: in the place of float32 and
  /// of 16 bits, which is float32 otherwise.
  std::vector<at::Tensor> zeros_like_parameters(std::optional<c10::ScalarType> type = std::nullopt) const;
  bool has_master(std::size_t index) const { return masters_[index].defined(); }
  /// Appends state with the parameters' shapes and with their layout over the ranks.
  void collect_elements(TrainState& state, const std::vector<at::Tensor>& tensors, const std::string& what) const;
  void collect_masters(TrainState& state) const;
  /// Appends state that is the same on every rank.
  void collect_replicated(TrainState& state, const std::vector<at::Tensor>& tensors, const std::string& what) const;

  std::vector<NamedTensor> parameters_;

 private:
  void check_options(const StepOptions& options) const;
  Target target_of(std::size_t index, double lr, const StepOptions& options) const;
  static void step_part(const Target& target, std::size_t number, std::int64_t first, std::int64_t count,
                        const Part& body);
  void step_widened(const Target& target, const std::optional<at::Tensor>& skip);
  void step_group_by_libtorch(const std::vector<Target>& group, const std::optional<at::Tensor>& skip);

  bool widens(const at::Tensor& parameter) const;

  Storage storage_;
  std::vector<ParameterSettings> settings_;  // by parameter
  std::vector<at::Tensor> masters_;          // by parameter; undefined if it needs none
};

}  // namespace phalanx
