// The rules for changed keys of the configuration. For each key: may a run that resumes from a checkpoint have another
// value, and must all ranks of a run have the same value?
//
// A new key needs a row here; a test fails without one. It does not use torch.
//
//   const SettingRule* rule = setting_rule("optimizer", "lr");
//   if (rule != nullptr && rule->on_resume == OnResume::said) log_change();
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace phalanx::config {

enum class OnResume : std::uint8_t {
  refused,    // the saved state would be meaningless: an error that names both values
  said,       // a line at the start of the log, and an entry in the history of run.json
  elsewhere,  // what it refers to is compared instead of its text; `why` says where
  silent      // changes neither state nor losses; `why` says why
};

enum class AcrossRanks : std::uint8_t {
  same,  // a difference is an error on every rank
  free   // may differ: it concerns each rank's own node
};

struct SettingRule {
  std::string_view section, name;
  OnResume on_resume;
  std::string_view why = {};  // set for all except `said`
  AcrossRanks across_ranks = AcrossRanks::same;
};

/// In the order of known_keys().
const std::vector<SettingRule>& setting_rules();
/// Null for a key without a rule.
const SettingRule* setting_rule(std::string_view section, std::string_view name);

}  // namespace phalanx::config
