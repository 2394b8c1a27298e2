// Checks that no weight holds an infinity or a NaN. A run that saved and continued from such weights would lose the
// good ones before them.
//
//   require_finite_weights(*world, model.weights(), "step 200", "lower the learning rate");   // before they are saved
#pragma once

#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

/// Collective. Reads each rank's shards once and waits for its device.
/// Throws Error on all ranks if a weight is not finite. It names the first such tensor of the first rank that has one;
/// `when` begins the message, `advice` ends it.
void require_finite_weights(Communicator& world, const std::vector<NamedTensor>& weights, const std::string& when,
                            const std::string& advice);

}  // namespace phalanx::train
