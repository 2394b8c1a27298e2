// What several runs have different: keys of their configurations, or of any other list of names and values.
//
//   differences({config_values(a), config_values(b)});   // {"optimizer.lr", {"0.002", "0.006"}}
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace phalanx::report {

using NamedValues = std::vector<std::pair<std::string, std::string>>;

/// The keys of a configuration as print_config() writes it: {"training.steps", "100"}.
/// A key that is not set there has the value "not set".
NamedValues config_values(std::string_view toml);

struct ComparedValues {
  std::string name;
  std::vector<std::optional<std::string>> values;  // of each list; unset: the list does not have the name
};

/// All names, in the order of the first list, then of the others' further ones.
std::vector<ComparedValues> side_by_side(const std::vector<NamedValues>& lists);

/// Those of them that do not have the same value in each list.
std::vector<ComparedValues> differences(const std::vector<NamedValues>& lists);

}  // namespace phalanx::report
