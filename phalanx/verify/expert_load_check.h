// Compares the load of experts and the biases that even it out with those of one rank, for layout_check.h.
//
// Both sides have had the same weights and biases in a step. So they have chosen the same experts, but for tokens of
// which two experts were so nearly equal that rounding decided. The counts say how many at least, and for which experts.
#pragma once

#include <optional>

#include "phalanx/comm/communicator.h"
#include "phalanx/train/expert_load.h"
#include "phalanx/verify/layout_check.h"

namespace phalanx::verify {

/// Of the passes of a step, on all ranks. `reference`: on rank 0, else null. `near_ties`: the share of a layer's choices
/// that may be others. Nothing without biases: padding counts, too, and may differ then. Collective.
std::optional<LayoutFinding> compare_expert_load(train::ExpertLoad& layout, train::ExpertLoad* reference,
                                                 Communicator& world, double near_ties);
/// The same, and the biases after the optimizer step; the reference takes them over at the end.
std::optional<LayoutFinding> compare_expert_biases(train::ExpertLoad& layout, train::ExpertLoad* reference,
                                                   Communicator& world, double near_ties);

}  // namespace phalanx::verify
