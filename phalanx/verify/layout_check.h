// Proves a layout: trains the same model on the same data once on one rank and once as the configuration lays it out,
// side by side, and compares the losses, every gradient and every weight after every step. `phalanx verify`.
//
// Rank 0 has the reference: the whole model in the same precision, no recomputation, gradients accumulated over the
// whole global batch. What it finds goes to all ranks, and each compares the part that it has, copies included: a wrong
// value is found wherever it is. Both start from the same values, which must be equal to the bit. The layout is then
// left alone; the reference takes its weights over after every step, so that each step begins at equal weights. Once
// gradients are wrong the step is run again to see where it begins (layout_origin.h).
//
// Tolerances, the same at every step and learning rate. In float32 sums are rounded in another order: gradients may
// differ by 1e-5 of their 2-norm, losses by 2e-5 relatively. In 16 bits beside a sharded layout the reference holds a
// copy of the model in that type (LayoutSide::compute_in), so that both round alike; under tensor parallelism gradients
// may differ by four times what rounding does to the same step on one rank, which is measured (LayoutSide::Rounding).
// Weights may differ by 2e-5 of their norm and by what the gradients' own differences account for (update_bound.h): as
// AdamW moves a weight by the learning rate whatever its gradient's size, those near zero may go the other way.
//
// Recomputation computes the same on the same ranks, so there the tolerance is none: a layout that recomputes is held
// against the same layout that does not, too, and must have the same bits (one rank: against that rank). This is what
// finds a copy of a weight that outlives the optimizer's step, however small the step. On the host only, over backends
// that sum in the order of ranks: elsewhere two runs of one layout differ by rounding.
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

namespace phalanx::train {

struct LayoutSide;

struct LayoutTolerance {
  double loss = 2e-5;
  double gradient = 1e-5;
  double weight = 2e-5;         // after an update, beside what the gradients' differences account for (update_bound.h)
  double weight_in_use = 2e-5;  // by a pass: where it was cast to 16 bits it is rounded
  double activation = 2e-4;     // of what a layer hands on, where the origin of a wrong gradient is looked for
};

/// What this layout may differ by from one rank in the same precision: by nothing where it is one rank on the host.
LayoutTolerance tolerance_for(const TrainConfig& config, std::int64_t ranks, at::Device device);
/// The same for people: one line. Layouts that are allowed the same for the same reason have the same one.
std::string tolerance_text(const TrainConfig& config, std::int64_t ranks, const LayoutTolerance& tolerance);
/// Whether products are in 16 bits and not those of one rank, but of parts of rows.
bool rounds_its_own_products(const TrainConfig& config, std::int64_t ranks);

struct LayoutCheckOptions {
  std::int64_t steps = 3;
  std::optional<LayoutTolerance> tolerance;  // unset: by the precision of the configuration
};

/// What is further off than it may be, of whatever came first.
struct LayoutFinding {
  std::int64_t step = 0;  // from 1; 0: before the first
  std::string what;       // "initial value", "loss", "gradient", "gradient norm", "weight", or of layout_origin.h
  std::string parameter;  // empty for a loss, a norm or a batch
  int rank = 0;
  TensorDifference difference;
  double tolerance = 0;
  std::int64_t others = 0;  // parameters that were wrong at the same time
  std::string cause;        // the likely one, in words
  std::string text() const;
};

/// One parameter at one step, on the rank where it is furthest off.
struct ParameterCheck {
  std::string name;
  int rank = 0;
  TensorDifference difference;
};

struct StepCheck {
  std::int64_t step = 0;  // from 1
  double expected_loss = 0, loss = 0;
  double expected_norm = 0, norm = 0;              // of the gradients, before clipping
  std::vector<ParameterCheck> gradients, weights;  // in the model's order
};

/// The same on every rank.
struct LayoutCheck {
  std::string layout;
  LayoutTolerance tolerance;
  std::vector<std::string> notes;  // what was met on the way and is nobody's fault: float16 that overflowed
  std::vector<StepCheck> steps;    // up to the first one that is wrong
  std::optional<LayoutFinding> finding;
};

struct LayoutCheckContext {
  std::shared_ptr<Communicator> world;
  std::shared_ptr<Communicator> layout_world = nullptr;  // what the layout talks over, where that is another one
  at::Device device = at::kCPU;
  /// Shown what the layout trains on this rank: once it has its values (step 0), and whenever a step has its gradients.
  std::function<void(std::int64_t step, const std::vector<NamedTensor>& parameters)> observer = nullptr;
  /// Given the layout's side on this rank before the first step, so that a test can spoil it.
  std::function<void(LayoutSide& side)> prepare = nullptr;
};

/// The layout is the configuration's, over all ranks of the world. Throws what a run of it would.
LayoutCheck check_layout(const TrainConfig& config, const LayoutCheckContext& context,
                         const LayoutCheckOptions& options = {});

/// The same run on one rank, without recomputation.
TrainConfig reference_config(TrainConfig config);

}  // namespace phalanx::train
