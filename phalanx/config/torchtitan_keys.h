// What torchtitan's files say that Phalanx says otherwise or not at all: keys that are refused by name, other names of
// keys and of values, and torchtitan's own defaults (`--like torchtitan`). Tables; config_reader.h applies them.
//
//   for (const RefusedKey& key : refused_keys()) ...
//   meant_value("model", "flavor", "debugmodel");   // "llama3_debug"
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace phalanx::config {

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

}  // namespace phalanx::config
