// One of the two runs that a layout check compares: a model with its optimizer and data, in some layout.
//
//   LayoutSide side(config, world, device);            // collective; has its initial values
//   const double loss = side.forward_backward(step);   // of this rank's rows
//   side.optimizer_step->apply(step);
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/models/llama.h"
#include "phalanx/train/forward_backward_step.h"
#include "phalanx/train/training_data.h"
#include "phalanx/verify/routing_replay.h"

namespace phalanx::verify {

struct LayoutSide {
  LayoutSide(const config::TrainConfig& config, const std::shared_ptr<Communicator>& world, at::Device device);

  /// From here on every pass uses a model whose weights are all of this type, copies of `model`'s. Their gradients are
  /// summed over micro-batches in float32. A sharded layout computes the same, by other means.
  /// REQUIRES: there is only one rank.
  void compute_in(const config::TrainConfig& config, at::ScalarType dtype);
  /// From here on routing() can record and replay where tokens go. After compute_in(), if that is called. Does nothing
  /// for a model without experts.
  void observe_routing();
  RoutingReplay* routing() const noexcept { return routing_.get(); }  // null: not observed, or no experts
  /// The modules that the passes run: those of `model`, or of the copy in another type.
  std::vector<nn::Module*> modules() const;
  /// This rank's part of the step's loss, times the number of parts: its mean over the ranks is the step's loss.
  double forward_backward(std::int64_t step);
  /// The rows of the global batch that belong to this rank's data-parallel rank.
  data::RowRange rows() const;

  void drop_gradients();
  /// The name of the first parameter whose gradient is not finite on this rank; empty: none.
  std::string first_not_finite() const;
  void scale_loss(double factor);  // multiplies the current loss scale
  /// The effect of rounding to 16 bits, and to float8, alone on loss and gradients at the current weights: how far the
  /// current gradients, found with `loss`, are from those in float32, relative to their size.
  struct Rounding {
    double loss = 0;
    std::vector<double> gradients;           // in the model's order
    std::map<std::int64_t, double> routers;  // of their logits, by layer
  };
  /// Leaves the gradients as they are. Tokens go where the routing that is replayed sends them.
  Rounding rounding_of_gradients(std::int64_t step, double loss);

  config::RunPlan plan;
  train::TrainingData data;
  std::unique_ptr<train::ParallelModel> model;
  train::ForwardBackwardOptions options;
  std::unique_ptr<train::OptimizerStep> optimizer_step;

 private:
  double forward_backward_in_cast(std::int64_t step);
  double plain_forward_backward(std::int64_t step);

  std::shared_ptr<models::Llama> cast_;  // the model in another type; null: none
  double z_loss_weight_ = 0;
  std::unique_ptr<RoutingReplay> routing_;  // behind the models whose mixtures it knows
};

}  // namespace phalanx::verify
