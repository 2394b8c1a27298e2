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

/// RefusedKey::accepted of a key that has no effect by itself: every value is accepted.
inline constexpr std::string_view kAnyValue = "any";

/// A torchtitan key that Phalanx knows and does not support. It is refused by name, except at the value that means
/// "off" and in a section that is switched off.
struct RefusedKey {
  std::string_view section;
  std::string_view name;      // "*": every key of the section
  std::string_view accepted;  // the value, in TOML syntax, that changes nothing; empty: none; or kAnyValue
  std::string_view reason;
  std::string_view said = {};  // the value that is accepted with a log line at the start, because it has no effect
};
const std::vector<RefusedKey>& refused_keys();

/// A key of another torchtitan version that means the same as a known key.
struct KeyAlias {
  std::string_view section, name;
  std::string_view known_section, known_name;
};
const std::vector<KeyAlias>& key_aliases();

/// A value that torchtitan's files give to a key, and its name here.
struct ValueAlias {
  std::string_view section, name;
  std::string_view written, meant;
};
const std::vector<ValueAlias>& value_aliases();
/// The name here of such a value; `written` itself if it has no other name.
std::string meant_value(std::string_view section, std::string_view name, std::string_view written);

/// A default of another program, applied before the file is read: `--like NAME`.
struct PresetValue {
  std::string_view section, name;
  std::string_view text;
};
struct Preset {
  std::string_view name;
  std::vector<PresetValue> values;
};
const std::vector<Preset>& presets();

std::string key_label(std::string_view section, std::string_view name);  // "[training] steps"

std::string_view type_name(
    const Slot& slot);  // "boolean", "integer", "number", "string", "list of strings", "list of tables"
std::string toml_value(const Slot& slot);            // as in a file; empty for an unset optional
std::string expectation(const Key& key, Slot slot);  // "an integer, 1 or more"

}  // namespace phalanx::config
