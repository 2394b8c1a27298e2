// Weights that hold an infinity or a NaN are no model, and whoever went on from them would lose the sound ones before.
//
//   require_finite_weights(*world, model.weights(), "step 200");   // before they are saved
#pragma once

#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

/// Error, on all ranks, that names the first such tensor of the first rank that has one; `when` begins it, `advice`
/// ends it. Collective. Reads each rank's parts once and waits for its device.
void require_finite_weights(Communicator& world, const std::vector<NamedTensor>& weights, const std::string& when,
                            const std::string& advice);

}  // namespace phalanx::train
