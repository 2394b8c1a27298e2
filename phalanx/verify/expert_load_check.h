// Compares the load of experts and the biases that even it out with those of one rank, for layout_check.h.
//
// Both sides have sent each token to the same experts (routing_replay.h), so both must be equal.
#pragma once

#include <optional>

#include "phalanx/comm/communicator.h"
#include "phalanx/train/model/expert_load.h"
#include "phalanx/verify/layout_check.h"

namespace phalanx::verify {

/// After the optimizer step, on all ranks. `reference`: on rank 0, else null; it takes the layout's biases over.
/// Nothing without biases. Collective.
std::optional<LayoutFinding> compare_expert_biases(train::ExpertLoad& layout, train::ExpertLoad* reference,
                                                   Communicator& world);

}  // namespace phalanx::verify
