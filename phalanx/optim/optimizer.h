// Optimizer: turns gradients into an update. AdamW, SGD and Adadelta derive from it.
//
// Contract
// - Parameters are given with their fully qualified names; state is named by them ("optimizer.<fqn>.exp_avg"), never by
//   an index, so that a checkpoint survives a change of order. A name or a tensor given twice is an Error.
// - All state tensors exist from construction on: loading a checkpoint fills them in place, before or after steps.
// - step(lr) updates every parameter whose gradient is defined; the others, and their state, stay as they are.
// - The arithmetic is element by element. For float32 on the CPU an element gets the same bits at any offset and
//   length, with any number of threads and on every instruction set, so a rank that holds a part of a parameter
//   (NamedTensor's shard) computes what a rank with all of it computes there. Other devices and dtypes go through
//   libtorch's fused kernels: equal tensors get equal bits, parts of them may differ in the last bit.
// - Parameters of 16 bits (bfloat16, float16) have a float32 master, "optimizer.<fqn>.master", and moments in float32:
//   the master is stepped, and the parameter is the master rounded. A parameter that somebody else has written (loaded
//   weights) is taken over by its master at the next step. Without masters (the options' master_weights) libtorch's
//   kernels step such parameters in their own precision, in which small updates are lost.
// - A rank whose part is empty steps too: its gradient should be defined (and empty) wherever the other ranks' are,
//   for the steps of each parameter are counted on every rank.
//
//   AdamW optimizer(parameters_of(*model), {.weight_decay = 0.1});
//   loss.backward();
//   clip_grad_norm(optimizer.parameters(), 1.0);
//   optimizer.step(schedule.lr_at(step));
//   optimizer.zero_grad();
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/tensor/named.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx {

struct StepOptions {
  double grad_factor = 1;  // multiplies every gradient on its way (where there is a master, in float32): loss_scaler.h
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Throws Error where a gradient's shape or device is not its parameter's; nothing is updated then.
  void step(double lr, StepOptions options = {});
  /// Appends handles to the state under "optimizer.<fqn>.<what>".
  virtual void collect_state(TrainState& state) const = 0;

  /// Makes every gradient undefined: the next backward writes it instead of adding to zeros.
  void zero_grad();
  const std::vector<NamedTensor>& parameters() const noexcept { return parameters_; }

 protected:
  /// Throws on an empty list, an undefined or integer tensor, names or tensors given twice, and a tensor that is not of
  /// its shard's shape.
  Optimizer(std::vector<NamedTensor> parameters, bool master_weights);
  /// `who` begins the messages. See name_patterns.h for the patterns and what is thrown.
  void set_weight_decay(const std::string& who, double weight_decay, const std::vector<std::string>& no_decay);

  /// What is stepped for parameter `index`: it or its master, its gradient, and, on the CPU where there is a master,
  /// the 16-bit values; all dense and in the memory layout of the state.
  struct Target {
    std::size_t index = 0;
    at::Tensor parameter, grad, narrow;
    double weight_decay = 0;
    double grad_factor = 1;
  };
  /// One step of these, all float32 on the CPU; their gradients are for_each_part()'s.
  virtual void step_on_cpu(const std::vector<Target>& targets, double lr) = 0;
  /// One step of these, all of one device, dtype and weight decay, by libtorch's fused kernel.
  virtual void step_by_libtorch(const std::vector<Target>& targets, double lr) = 0;

  /// Calls body(target's number, first element, count, their gradient) for parts of all targets, on several threads.
  using Part = std::function<void(std::size_t number, std::int64_t first, std::size_t count, const float* grad)>;
  static void for_each_part(const std::vector<Target>& targets, const Part& body);

  /// One tensor of zeros like each parameter, or its master, in its memory layout.
  std::vector<at::Tensor> zeros_like_parameters() const;
  /// Of the parameters' shapes, and laid out over the ranks as they are.
  void collect_elements(TrainState& state, const std::vector<at::Tensor>& tensors, const std::string& what) const;
  void collect_masters(TrainState& state) const;
  /// The same on every rank.
  void collect_replicated(TrainState& state, const std::vector<at::Tensor>& tensors, const std::string& what) const;

  std::vector<NamedTensor> parameters_;

 private:
  Target target_of(std::size_t index, double grad_factor) const;
  static void step_part(const Target& target, std::size_t number, std::int64_t first, std::int64_t count,
                        const Part& body);
  void step_group_by_libtorch(const std::vector<Target>& group, double lr);

  std::vector<double> weight_decay_;                        // by parameter
  std::vector<at::Tensor> masters_;                         // by parameter; undefined where it is its own
  std::vector<std::shared_ptr<const Shard>> state_shards_;  // by parameter: its shard, in the dtype of its state
};

}  // namespace phalanx
