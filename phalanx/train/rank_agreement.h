// All ranks of a run say the same, or all of them end with the same error.
//
// Ranks exchange a hash; only where hashes differ do they send what they have, so that the error names each key that
// differs, its values, and the ranks that have them. Collective; free on a rank alone.
//
//   require_same_on_ranks(world, "configuration", settings_of_all_ranks(config), "give every rank the same one");
//   require_same_weights(world, model.weights());
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

/// `mine`: an object. The ConfigError says that the ranks do not have the same `what`, and ends with `advice`.
void require_same_on_ranks(Communicator& world, const std::string& what, const nlohmann::json& mine,
                           const std::string& advice);

/// Ranks that hold the same part of a tensor hold the same values: compared by a hash of up to a few thousand elements
/// of each, spread over it. The Error names tensors and ranks.
void require_same_weights(Communicator& world, const std::vector<NamedTensor>& weights);

}  // namespace phalanx::train
