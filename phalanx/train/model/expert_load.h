// ExpertLoad counts how many tokens go to each expert of each layer in a step, over all ranks, and moves the biases
// that even that out: those of experts with more tokens than the mean by the rate down, those with fewer by the rate
// up.
//
//   const auto load = ExpertLoad::make(config, plan, model_config, world, device);   // null without experts
//   load->attach(part, /*counts=*/true);   // forward passes of this part of the model count, and read the biases
//   load->begin_step();
//   ...                                    // all forward passes of the step
//   load->end_step(stepped);               // moves the biases; collective where they are moved
//   load->sum();                           // collective, if end_step() was not: counts() are now those of all ranks
//
// All ranks have the biases of all layers, with the same bits: counts are whole numbers, and their sum is exact in any
// layout. On a device nothing waits for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/config.h"
#include "phalanx/layout/parallel_plan.h"
#include "phalanx/models/llama.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

/// What the log says of a step.
struct ExpertLoadNumbers {
  std::vector<double> fullest;    // fullest_by_mean() of each layer with experts
  std::optional<double> dropped;  // share of all choices beyond an expert's capacity; unset: there is no capacity
};

class ExpertLoad {
 public:
  /// Null for a model without experts.
  static std::unique_ptr<ExpertLoad> make(const config::TrainConfig& config, const ParallelPlan& plan,
                                          const models::LlamaConfig& model, std::shared_ptr<Communicator> world,
                                          at::Device device);

  /// Forward passes of `model`, which is the model or a part of it, read the biases, and if `counts`, count tokens.
  void attach(models::Llama& model, bool counts) const;
  void begin_step();
  /// Moves the biases, if they have a rate and `stepped` (0-dim, on the device) is not 0. Collective with a rate.
  void end_step(const at::Tensor& stepped);
  /// Collective, once a step at most.
  void sum();

  /// int64 [layers, experts], not contiguous: of this rank, and after sum() of all. A token counts for each of its
  /// experts.
  const at::Tensor& counts() const noexcept { return counts_; }
  /// What numbers_of() is computed from, in one tensor: float64, on the device.
  at::Tensor for_readback() const;
  /// REQUIRES: `read` is all of for_readback().
  ExpertLoadNumbers numbers_of(std::vector<double> read) const;
  /// fp32 [layers, experts]; undefined without biases.
  const at::Tensor& biases() const noexcept { return biases_; }
  /// The biases as "layers.N.moe.expert_bias"; none without.
  std::vector<NamedTensor> named_biases() const;

 private:
  ExpertLoad() = default;
  std::shared_ptr<Communicator> world_;
  at::Tensor all_;               // int64 [layers, experts + 1], summed over ranks at once
  at::Tensor counts_, dropped_;  // views of it: [layers, experts], and [layers] of choices beyond a capacity
  at::Tensor biases_;
  double rate_ = 0;               // 0: the biases stay as they are
  std::int64_t first_layer_ = 0;  // with experts
  bool has_capacity_ = false;
  bool counts_here_ = true;  // ranks of tensor parallelism have the same tokens: the first one counts them
  bool is_sum_ = false;
};

/// For each layer, how many tokens the expert with most of them has, by the mean of its experts; 0 without tokens.
/// `counts`: those of counts(), row by row.
std::vector<double> fullest_by_mean(const std::vector<double>& counts, std::int64_t experts);

}  // namespace phalanx::train
