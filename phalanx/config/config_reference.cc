// docs/configuration.md, made from the table of keys.
#include <fmt/format.h>

#include <cmath>

#include "phalanx/config/config_schema.h"
#include "phalanx/config/slot_text.h"
#include "phalanx/config/torchtitan_keys.h"

namespace phalanx::config {
namespace {

std::string cell(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '|') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string accepted_text(const RefusedKey& key) {
  if (key.accepted.empty()) return "";
  return key.accepted == kAnyValue ? "any: it means nothing by itself" : fmt::format("`{}`", key.accepted);
}

constexpr std::string_view kOpening = R"(# Configuration

A run is described by one TOML file with torchtitan's sections and keys. Every key can also be given on the command
line, after the file's name, where it overrules the file:

    phalanx train configs/demo.toml --training.steps 100 --optimizer.lr=3e-4 --checkpoint.no-enable

Booleans are switched on by `--section.key` and off by `--section.no-key`. `--print-config` prints the effective file
and ends; what it prints can be used as a file. A key that is not in the tables below is an error that names the nearest
one. Integers, but for `debug.seed`, are at most 2147483647.

This page is printed by `phalanx train --print-config-reference`.
)";

}  // namespace

std::string config_reference() {
  TrainConfig defaults;
  std::string text(kOpening);
  std::string_view section;
  for (const Key& key : known_keys()) {
    if (key.section != section) {
      section = key.section;
      text += fmt::format("\n## [{}]\n\n| key | type | default | meaning |\n| --- | --- | --- | --- |\n", section);
    }
    const Slot slot = key.slot(defaults);
    const std::string shown_default =
        key.default_text.empty() ? fmt::format("`{}`", toml_value(slot)) : std::string(key.default_text);
    std::string meaning(key.help);
    if (!key.choices.empty() || std::isfinite(key.least)) {
      std::string expected = expectation(key, slot);
      if (expected.ends_with(kAtMostCount)) expected.resize(expected.size() - kAtMostCount.size());
      if (!expected.empty()) expected[0] = static_cast<char>(std::toupper(expected[0]));
      meaning += fmt::format(" {}.", expected);
    }
    text += fmt::format("| `{}` | {} | {} | {} |\n", key.name, type_name(slot), shown_default, cell(meaning));
  }

  text +=
      "\n## Keys of torchtitan that are refused\n\nThey are known, and refused by name so that no setting is silently "
      "without effect. The value in the second column is\naccepted because it is how Phalanx works anyway. In a "
      "section that is switched off "
      "(`enable = false`) no key is refused, known or not; one line at the start names those that are not read.\n\n"
      "| key | accepted value | reason |\n| --- | --- | --- |\n";
  for (const RefusedKey& key : refused_keys()) {
    const std::string name = key.name == "*" ? fmt::format("the rest of [{}]", key.section)
                                             : fmt::format("`[{}] {}`", key.section, key.name);
    text += fmt::format("| {} | {} | {} |\n", name, accepted_text(key), cell(key.reason));
  }

  text += "\n## Other names of keys\n\n| written | means |\n| --- | --- |\n";
  for (const KeyAlias& alias : key_aliases()) {
    text +=
        fmt::format("| `[{}] {}` | `[{}] {}` |\n", alias.section, alias.name, alias.known_section, alias.known_name);
  }

  text += "\n## Other names of values\n\n| written | means |\n| --- | --- |\n";
  for (const ValueAlias& alias : value_aliases()) {
    text += fmt::format("| `[{}] {} = \"{}\"` | `\"{}\"` |\n", alias.section, alias.name, alias.written, alias.meant);
  }
  text += "| types: `bf16`; `fp16`, `f16`, `half`; `fp32`, `f32`, `float` | `bfloat16`; `float16`; `float32` |\n";

  text += "\n## Defaults of other programs\n";
  for (const Preset& preset : presets()) {
    text += fmt::format("\n`--like {}` takes these values where neither the file nor a flag gives another:\n\n",
                        preset.name);
    for (const PresetValue& value : preset.values) {
      text += fmt::format("- `[{}] {}`: `{}`\n", value.section, value.name, value.text);
    }
  }
  return text;
}

}  // namespace phalanx::config
