// What it means that a key of the configuration is changed: for each key, whether a run that goes on from a checkpoint
// may have another value, and whether all ranks of a run must have the same one.
//
// A new key needs a row here: a test fails without one. Knows no tensor.
//
//   if (const SettingRule* rule = setting_rule("optimizer", "lr")) ... rule->on_resume == OnResume::said
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace phalanx::train {

enum class OnResume : std::uint8_t {
  refused,    // the saved state would mean nothing: an error that names both values
  said,       // a line at the start of the log, and an entry in the history of run.json
  elsewhere,  // not compared by its text, but by what it stands for; `why` says where
  silent      // changes neither state nor losses; `why` says why
};

enum class AcrossRanks : std::uint8_t {
  same,  // a difference is an error on every rank
  free   // of each rank's own machine
};

struct SettingRule {
  std::string_view section, name;
  OnResume on_resume;
  std::string_view why = {};  // of all but said
  AcrossRanks across_ranks = AcrossRanks::same;
};

/// In the order of known_keys().
const std::vector<SettingRule>& setting_rules();
/// Null for a key without a rule.
const SettingRule* setting_rule(std::string_view section, std::string_view name);

}  // namespace phalanx::train
