// AdamW: Adam with decoupled weight decay, one fused pass over parameter, gradient and both moments.
//
//   p    <- p - lr * weight_decay * p
//   m    <- beta1 m + (1 - beta1) g
//   v    <- beta2 v + (1 - beta2) g^2
//   p    <- p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
//
// State per parameter: exp_avg (m), exp_avg_sq (v) and step (t, a 0-dim float32 on the parameter's device).
//
// The step is computed in float32, whatever the types of parameter and moments. Moments may be kept in bfloat16
// (state_dtype), and 16-bit parameters without a master (master_weights). What is kept in 16 bits is rounded after each
// step: to the nearest number, in which changes below half of the distance between two numbers are lost, or
// stochastically (stochastic_rounding.h). Every layout rounds alike.
//
// See optimizer.h for the contract.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/layout/box.h"
#include "phalanx/optim/optimizer.h"

namespace phalanx {

struct AdamWStep;

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  std::vector<std::string> no_decay;   // patterns of names that do not decay: {"*norm*", "*.bias"}; name_patterns.h
  std::vector<ParameterGroup> groups;  // with rates or weight decays of their own; parameter_groups.h
  bool master_weights = true;          // of 16-bit parameters; see optimizer.h
  c10::ScalarType state_dtype = c10::ScalarType::Float;  // of the moments; or BFloat16. Those of float64 are float64
  bool stochastic_rounding = false;  // of bfloat16 moments, and bfloat16 parameters without a master
  std::uint64_t seed = 0;            // of stochastic_rounding
};

class AdamW final : public Optimizer {
 public:
  explicit AdamW(std::vector<NamedTensor> parameters, AdamWOptions options = {});
  bool scales_gradients_itself() const override;
  void collect_state(TrainState& state) const override;
  const AdamWOptions& options() const noexcept { return options_; }

 private:
  void step_on_cpu(const std::vector<Target>& targets) override;
  void step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) override;
  bool step_by_gpu_kernel(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) override;

  /// How one parameter's numbers of 16 bits are rounded stochastically.
  struct Rounding {
    std::uint64_t parameter, exp_avg, exp_avg_sq;  // streams
    std::vector<FlatRange> ranges;                 // of the elements in the global tensor, all of one length
    std::optional<std::int64_t> stride;            // from each range to the next, if that is the same for all
    at::Tensor begins;                             // of the ranges, on the parameter's device, if it is not
  };
  static Rounding rounding_of(const NamedTensor& parameter, std::uint64_t seed);
  bool has_narrow_numbers(const Target& target) const;
  void step_narrow(const AdamWStep& step, float number, const Target& target, std::int64_t first, std::size_t count,
                   const float* grad);
  /// As step_by_libtorch(), of targets with numbers of 16 bits. The counters of steps are already those of this step.
  void step_narrow_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip);
  /// Of elements of this rank's part, in the global tensor: int64 on the parameter's device.
  at::Tensor indices_of(std::size_t parameter, std::int64_t first, std::int64_t count) const;

  AdamWOptions options_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_, steps_;
  std::vector<Rounding> roundings_;  // by parameter, if options_.stochastic_rounding
};

}  // namespace phalanx
