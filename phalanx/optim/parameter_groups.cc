#include "phalanx/optim/parameter_groups.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/base/name_patterns.h"

namespace phalanx {
namespace {

std::string group_text(std::size_t number, const ParameterGroup& group) {
  return fmt::format("group {} (\"{}\")", number + 1, fmt::join(group.params, "\", \""));
}

void require_not_negative(const std::string& who, double weight_decay) {
  if (weight_decay >= 0) return;
  throw ConfigError(fmt::format("{}: weight_decay is {}: expected 0 or a positive number", who, weight_decay));
}

}  // namespace

std::vector<ParameterSettings> settings_by_name(const std::string& who, const std::vector<std::string>& names,
                                                double weight_decay, const std::vector<std::string>& no_decay,
                                                const std::vector<ParameterGroup>& groups) {
  require_not_negative(who, weight_decay);
  const std::vector<bool> exempt = matching_names(who + ": no_decay", no_decay, names);
  std::vector<ParameterSettings> settings;
  for (std::size_t i = 0; i < names.size(); ++i) settings.push_back({.weight_decay = exempt[i] ? 0 : weight_decay});
  std::vector<std::optional<std::size_t>> group_of(names.size());
  for (std::size_t number = 0; number < groups.size(); ++number) {
    const ParameterGroup& group = groups[number];
    const std::string what = fmt::format("{}: {}", who, group_text(number, group));
    if (!(group.lr_factor > 0) || !std::isfinite(group.lr_factor)) {
      throw ConfigError(fmt::format("{}: lr_factor is {}: expected a positive number", what, group.lr_factor));
    }
    if (group.weight_decay) require_not_negative(what, *group.weight_decay);
    const std::vector<bool> matched = matching_names(what, group.params, names);
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (!matched[i]) continue;
      if (group_of[i]) {
        throw ConfigError(fmt::format("{}: parameter '{}' belongs to {} and to {}: expected one group at most", who,
                                      names[i], group_text(*group_of[i], groups[*group_of[i]]),
                                      group_text(number, group)));
      }
      if (exempt[i] && group.weight_decay) {
        throw ConfigError(fmt::format(
            "{}: parameter '{}' is named by no_decay, and {} sets its weight_decay to {}: expected one of them", who,
            names[i], group_text(number, group), *group.weight_decay));
      }
      group_of[i] = number;
      settings[i].lr_factor = group.lr_factor;
      if (group.weight_decay) settings[i].weight_decay = *group.weight_decay;
    }
  }
  return settings;
}

}  // namespace phalanx
