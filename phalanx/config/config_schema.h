// The table of configuration keys: one row a key, from which reading, overriding, printing and the reference follow.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "phalanx/config/config.h"

namespace phalanx::train {

/// Where a key's value lives in a TrainConfig; the alternative is the key's type.
using Slot = std::variant<bool*, std::int64_t*, double*, std::string*, std::optional<bool>*, std::optional<double>*,
                          std::vector<std::string>*>;

/// default_text of a model number that the flavor gives.
inline constexpr std::string_view kFromFlavor = "the flavor's";

/// What ends the expectation of a count.
inline constexpr std::string_view kAtMostCount = ", and at most 2147483647";

struct Key {
  std::string_view section;
  std::string_view name;
  Slot (*slot)(TrainConfig&);
  std::string_view help;
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  std::vector<std::string_view> choices = {};
  std::string_view default_text = {};  // shown in the reference in place of the default value
  std::string_view or_count = {};      // "a number of ranks": a choice may also be an integer, 1 or more
};

/// In the order of sections and keys in which they are printed.
const std::vector<Key>& known_keys();

/// RefusedKey::accepted of a key that means nothing by itself.
inline constexpr std::string_view kAnyValue = "any";

/// A torchtitan key that Phalanx knows and does not support: refused by name, except at the value that means "off", and
/// in a section that is switched off.
struct RefusedKey {
  std::string_view section;
  std::string_view name;      // "*": every key of the section
  std::string_view accepted;  // the value, written as in TOML, that changes nothing; empty: none; or kAnyValue
  std::string_view reason;
  std::string_view said = {};  // the value that is accepted with one line at the start, for it has no effect
};
const std::vector<RefusedKey>& refused_keys();

/// Keys of other torchtitan versions that mean the same as a known key.
struct KeyAlias {
  std::string_view section, name;
  std::string_view known_section, known_name;
};
const std::vector<KeyAlias>& key_aliases();

/// Values that torchtitan's files give to a key, and what they are called here.
struct ValueAlias {
  std::string_view section, name;
  std::string_view written, meant;
};
const std::vector<ValueAlias>& value_aliases();
/// What such a value is called here; `written` itself where it has no other name.
std::string meant_value(std::string_view section, std::string_view name, std::string_view written);

/// Defaults of another program, taken before the file is read: `--like NAME`.
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

std::string_view type_name(const Slot& slot);        // "boolean", "integer", "number", "string", "list of strings"
std::string toml_value(const Slot& slot);            // as it is written in a file; empty for an unset optional
std::string expectation(const Key& key, Slot slot);  // "an integer, 1 or more"

}  // namespace phalanx::train
