// Verifies a layout: trains the same model on the same data once on one rank and once in the configuration's layout,
// side by side. It compares the losses, every gradient and every weight after every step. Used by `phalanx verify`.
//
// Rank 0 has the reference: the whole model in the same precision, no recomputation, gradients accumulated over the
// whole global batch. Rank 0 sends its values to all ranks, and each rank compares the part it has, copies included. So
// a wrong value is found wherever it is. Both sides start from the same values, which must be equal to the bit. From
// then on the layout runs undisturbed. The reference takes the layout's weights after every step, so that each
// step begins at equal weights. If gradients are wrong, the step is run again to see where the error begins
// (layout_origin.h).
//
// Gradients, losses and updates are each compared from equal values: before the optimizer steps, the reference takes
// the layout's gradients, and after the step its weights. So an update is compared with what one rank's optimizer makes
// of the same gradients, relative to the update's own norm. However small a step is, a wrong one is found.
//
// Tolerances are the same at every step and learning rate.
// - In float32 sums are rounded in another order. Gradients may differ by 1e-5 of their 2-norm, losses by 2e-5
//   relatively. A gradient that is zero in theory, such as that of GPT-2's key biases, is nothing but rounding: one
//   whose norm is below 1e-4 of the whole gradient's is compared with 1e-4 of that.
// - In 16 bits with a sharded layout the reference holds a copy of the model in that type (LayoutSide::compute_in), so
//   that both round alike. With tensor parallelism gradients may differ by four times the effect of rounding on the
//   same step on one rank, which is measured (LayoutSide::Rounding).
// - Updates may differ by 1e-5 of their norm; on a device also by the rounding of the weights. On the host, optimizers
//   give the same bits to the same gradients in every layout.
//
// Recomputation computes the same on the same ranks, so its tolerance is zero. A layout that recomputes is also
// compared with the same layout without recomputation, and must have the same bits (on one rank: with that rank). This
// finds a copy of a weight that outlives the optimizer's step, however small the step. It is done only on the host,
// over backends that sum in the order of ranks: elsewhere two runs of one layout differ by rounding.
//
//   const LayoutCheck check = check_layout(config, {.world = world}, {.steps = 3});     // collective
//   if (check.finding) log::error(check.finding->text());
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/run_plan.h"
#include "phalanx/tensor/named.h"
#include "phalanx/verify/tensor_difference.h"

namespace phalanx::verify {

struct LayoutSide;

struct LayoutTolerance {
  double loss = 2e-5;
  double gradient = 1e-5;
  double update = 1e-5;         // of weights in a step, relative to its own norm, from equal gradients
  double weight_in_use = 2e-5;  // of a weight as a pass uses it: if it was cast to 16 bits it is rounded
  double activation = 2e-4;     // of a layer's output, when looking for the origin of a wrong gradient
};

/// How far this layout may differ from one rank in the same precision: by nothing if it is one rank on the host.
LayoutTolerance tolerance_for(const config::TrainConfig& config, std::int64_t ranks, at::Device device);
/// The tolerance in words: one line. Layouts with the same tolerance for the same reason have the same line.
std::string tolerance_text(const config::TrainConfig& config, std::int64_t ranks, const LayoutTolerance& tolerance);
/// Whether matrix products are in 16 bits and are computed over parts of rows, unlike those of one rank.
bool rounds_its_own_products(const config::TrainConfig& config, std::int64_t ranks);

struct LayoutCheckOptions {
  std::int64_t steps = 3;
  std::optional<LayoutTolerance> tolerance;  // unset: by the precision of the configuration
};

/// The first value that differs by more than its tolerance.
struct LayoutFinding {
  std::int64_t step = 0;  // from 1; 0: before the first
  /// "initial value", "loss", "gradient", "gradient norm", "update", "load of experts", "bias of experts", or of
  /// layout_origin.h
  std::string what;
  std::string parameter;  // empty for a loss, a norm or a batch
  int rank = 0;
  TensorDifference difference;
  double tolerance = 0;
  std::int64_t others = 0;  // parameters that were wrong at the same time
  std::string cause;        // the likely cause, in words
  std::string text() const;
};

/// One parameter at one step, on the rank with the largest difference.
struct ParameterCheck {
  std::string name;
  int rank = 0;
  TensorDifference difference;
};

struct StepCheck {
  std::int64_t step = 0;  // from 1
  double expected_loss = 0, loss = 0;
  double expected_norm = 0, norm = 0;              // of the gradients, before clipping
  std::vector<ParameterCheck> gradients, updates;  // in the model's order
};

/// The same on every rank.
struct LayoutCheck {
  std::string layout;
  LayoutTolerance tolerance;
  std::vector<std::string> notes;  // events that are not errors of the layout, such as an overflow in float16
  std::vector<StepCheck> steps;    // up to the first wrong one
  /// Losses that were compared on all ranks while a token of another document was changed (document_probe.h); unset:
  /// documents are not kept apart.
  std::optional<std::int64_t> documents_compared = {};
  std::optional<LayoutFinding> finding;
};

struct LayoutCheckContext {
  std::shared_ptr<Communicator> world;
  std::shared_ptr<Communicator> layout_world = nullptr;  // what the layout communicates over; null: `world`
  at::Device device = at::kCPU;
  /// Called with the layout's parameters on this rank: when they have values (step 0), and when a step has gradients.
  std::function<void(std::int64_t step, const std::vector<NamedTensor>& parameters)> observer = nullptr;
  /// Called with the layout's side on this rank before the first step, so that a test can corrupt it.
  std::function<void(LayoutSide& side)> prepare = nullptr;
};

/// Collective. Checks the configuration's layout over all ranks of the world. Throws what a run of it would throw.
LayoutCheck check_layout(const config::TrainConfig& config, const LayoutCheckContext& context,
                         const LayoutCheckOptions& options = {});

/// The same run on one rank, without recomputation. `ranks`: of the layout. Throws ConfigError if no run on one rank is
/// the same.
config::TrainConfig reference_config(config::TrainConfig config, std::int64_t ranks);

}  // namespace phalanx::verify
