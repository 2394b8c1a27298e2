// Searches all layouts of a model over devices, finds those that fit, and recommends one. It does not use torch.
//
// A candidate is a mesh (pp, dp_replicate, dp_shard, tp, and of a mixture ep), a ZeRO stage, what is recomputed, and
// the largest batch of one forward pass with which it fits (or 1, if it fits with none). Tensor-parallel groups stay
// on one node. If devices differ, layouts over only the largest devices are candidates too. A rank's memory is that
// of predict_memory(). It is compared with its device's memory less the headroom; a pipeline's stages are compared
// with the devices they are on.
//
// Candidates are ordered by what training loses with them. Criteria, the most important first:
//   1  devices left out
//   2  cuts of the model: none (data parallelism, ZeRO), tensor, pipeline, both
//   3  what is recomputed: nothing, all but costly operations, everything
//   4  the degree of the cut
//   5  bytes that a rank sends in a step (comm_volume.h), inter-node bytes counted eightfold
//   6  the lowest ZeRO stage, the fewest passes
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
  std::int64_t max_batch = 8;  // sequences of one forward pass
  double headroom = 0.05;      // of a device's memory
  std::string schedule = "1F1B";
};

struct Candidate {
  Layout layout;
  TrainingMemory memory;       // of the rank with the least memory to spare
  std::int64_t available = 0;  // on its device
  StepCommVolume comm_volume;
  std::int64_t devices = 1;  // number used
  bool fits() const noexcept { return memory.total() <= available; }
};

/// Bytes of the activations if nothing is recomputed, all but costly operations, or everything.
struct ActivationChoices {
  std::int64_t none = 0, op = 0, full = 0;
};
ActivationChoices activation_choices(const TrainingShape& base, Layout layout);

/// Evaluates one layout on the first devices, as it is, whether the search would consider it or not. Throws ConfigError
/// if its schedule cannot have these numbers.
Candidate evaluate(const SearchOptions& options, const Layout& layout);

/// Best first, whether they fit or not. Throws ConfigError if the batch cannot be divided among the ranks at all.
std::vector<Candidate> search_layouts(const SearchOptions& options);
std::vector<Candidate> best_first(std::vector<Candidate> candidates);

/// The first that fits.
const Candidate* recommended(const std::vector<Candidate>& candidates);

/// Why `chosen` was chosen: the better candidates that do not fit. For each kind the one that comes nearest, a line
/// each.
std::vector<std::string> reasons(const std::vector<Candidate>& candidates, const Candidate& chosen);

}  // namespace phalanx::plan
