// [[optimizer.groups]]: one table for parameters that have a learning rate or a weight decay of their own.
//
//   [[optimizer.groups]]
//   params = ["*norm*", "*.bias"]        # patterns of names, as a shell's over files
//   weight_decay = 0
//   [[optimizer.groups]]
//   params = ["tok_embeddings.weight"]
//   lr_factor = 0.1
//
// On the command line the same as inline tables: --optimizer.groups '[{params = ["*norm*"], lr_factor = 0.1}]'.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace phalanx::config {

struct OptimizerGroup {
  std::vector<std::string> params;     // patterns
  double lr_factor = 1;                // multiplies the rate of every step
  std::optional<double> weight_decay;  // unset: [optimizer] weight_decay
  friend bool operator==(const OptimizerGroup&, const OptimizerGroup&) = default;
};
using OptimizerGroups = std::vector<OptimizerGroup>;

void to_json(nlohmann::json& json, const OptimizerGroup& group);

/// As inline tables; "[]" for none.
std::string optimizer_groups_toml(const OptimizerGroups& groups);

}  // namespace phalanx::config
