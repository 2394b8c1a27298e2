// The table of configuration keys: one row for each key. Reading, overriding, printing and the reference follow from
// it.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "phalanx/config/config.h"

namespace phalanx::config {

/// Points to a key's value in a TrainConfig. The alternative is the key's type.
using Slot = std::variant<bool*, std::int64_t*, double*, std::string*, std::optional<bool>*, std::optional<double>*,
                          std::vector<std::string>*, Datasets*, OptimizerGroups*, std::vector<double>*>;

/// default_text of a model dimension that the flavor provides.
inline constexpr std::string_view kFromFlavor = "the flavor's";

/// The section of float8, and its name in [model] converters.
inline constexpr std::string_view kFloat8Section = "quantize.linear.float8";

/// Its name in older versions of torchtitan.
inline constexpr std::string_view kOldFloat8 = "float8";

/// The end of the expectation text of a count.
inline constexpr std::string_view kAtMostCount = ", and at most 2147483647";

struct Key {
  std::string_view section;
  std::string_view name;
  Slot (*slot)(TrainConfig&);
  std::string_view help;
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  std::vector<std::string_view> choices = {};
  std::string_view default_text = {};  // shown in the reference instead of the default value
  std::string_view or_count = {};      // "a number of ranks": the value may also be an integer, 1 or more
};

/// In the order of sections and keys in which they are printed.
const std::vector<Key>& known_keys();

}  // namespace phalanx::config
