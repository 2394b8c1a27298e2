// All layouts of a model over devices, those that fit, and which of them to take. Knows no tensor.
//
// A candidate is a mesh (pp, dp_replicate, dp_shard, tp), a stage of ZeRO, what is computed again, and the largest
// batch of one forward pass with which it fits (or 1, where it fits with none). Tensor groups stay on one machine.
// Where devices differ, layouts over the largest alone are candidates, too. A rank's memory is predict_memory()'s, held
// against its device's less the headroom; a pipeline's stages are held against the devices that they are on.
//
// The order, first to last, is that of what training loses by it:
//   1  devices left out
//   2  cuts of the model: none (data parallelism, ZeRO), tensor, pipeline, both
//   3  what is computed again: nothing, all but costly operations, everything
//   4  the degree of the cut
//   5  bytes that a rank sends in a step (comm_volume.h), those to other machines counted eightfold
//   6  the lowest stage of ZeRO, the fewest passes
// Times are not predicted: `phalanx bench train` measures them.
//
//   const std::vector<Candidate> found = search_layouts({.base = base, .devices = devices, .global_batch = 64});
//   const Candidate* best = recommended(found);                  // nullptr: nothing fits
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/plan/comm_volume.h"
#include "phalanx/plan/devices.h"
#include "phalanx/plan/layout.h"

namespace phalanx::plan {

struct SearchOptions {
  TrainingShape base;  // model, sequence, optimizer, types: see apply_layout()
  Devices devices;
  std::int64_t global_batch = 1;
  std::int64_t max_batch = 8;  // sequences of one forward pass, at most
  double headroom = 0.05;      // of a device's memory
  std::string schedule = "1F1B";
};

struct Candidate {
  Layout layout;
  TrainingMemory memory;       // of the rank that has least to spare
  std::int64_t available = 0;  // on its device
  StepCommVolume comm_volume;
  std::int64_t devices = 1;  // that it uses
  bool fits() const noexcept { return memory.total() <= available; }
};

/// Bytes of the activations where nothing is computed again, all but costly operations, everything.
struct ActivationChoices {
  std::int64_t none = 0, op = 0, full = 0;
};
ActivationChoices activation_choices(const TrainingShape& base, Layout layout);

/// One layout on the first of the devices, as it is, whether the search would come to it or not. A ConfigError where
/// its schedule cannot have these numbers.
Candidate evaluate(const SearchOptions& options, const Layout& layout);

/// Best first, whether they fit or not. A ConfigError where the batch cannot be shared out at all.
std::vector<Candidate> search_layouts(const SearchOptions& options);
std::vector<Candidate> best_first(std::vector<Candidate> candidates);

/// The first that fits.
const Candidate* recommended(const std::vector<Candidate>& candidates);

/// Why it is that one: what comes before it and does not fit: of each kind the one that comes nearest, a line each.
std::vector<std::string> reasons(const std::vector<Candidate>& candidates, const Candidate& chosen);

}  // namespace phalanx::plan
