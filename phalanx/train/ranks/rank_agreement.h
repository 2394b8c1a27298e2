// Checks that all ranks of a run have the same values. If not, all of them end with the same error.
//
// Ranks exchange a hash. Only if the hashes differ do they send the values, so that the error names each key that
// differs, its values, and the ranks that have them. Collective; free on a single rank.
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

/// REQUIRES: `mine` is a JSON object. Throws ConfigError that says that the ranks do not have the same `what`, and ends
/// with `advice`.
void require_same_on_ranks(Communicator& world, const std::string& what, const nlohmann::json& mine,
                           const std::string& advice);

/// Checks that ranks with the same part of a tensor hold the same values. Compares a hash of up to a few thousand
/// elements of each part, spread over it. Throws Error that names tensors and ranks.
void require_same_weights(Communicator& world, const std::vector<NamedTensor>& weights);

}  // namespace phalanx::train
