#include "phalanx/config/config_reader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/config/config_schema.h"
#include "phalanx/config/given_value.h"
#include "phalanx/config/slot_text.h"
#include "phalanx/config/torchtitan_keys.h"

namespace phalanx::config {
namespace {

const Key* find_key(std::string_view section, std::string_view name) {
  for (const Key& key : known_keys()) {
    if (key.section == section && key.name == name) return &key;
  }
  for (const KeyAlias& alias : key_aliases()) {
    if (alias.section == section && alias.name == name) return find_key(alias.known_section, alias.known_name);
  }
  return nullptr;
}

const RefusedKey* find_refused(std::string_view section, std::string_view name) {
  const RefusedKey* whole_section = nullptr;
  for (const RefusedKey& key : refused_keys()) {
    if (key.section != section) continue;
    if (key.name == name) return &key;
    if (key.name == "*") whole_section = &key;
  }
  return whole_section;
}

bool is_boolean(std::string_view section, std::string_view name) {
  TrainConfig any;
  if (const Key* key = find_key(section, name)) return type_name(key->slot(any)) == "boolean";
  const RefusedKey* refused = find_refused(section, name);
  return refused && (is_boolean_text(refused->accepted) || name == "enable");
}

/// Whether a name begins with "no_", before that of a boolean key.
bool is_negated(std::string_view section, std::string_view name) {
  return name.starts_with("no_") && is_boolean(section, name.substr(3));
}

/// The section and the name in --section.key. Nothing if the text is none.
std::optional<std::pair<std::string, std::string>> split_flag(std::string path) {
  // The sections below quantize have dots in their names.
  const std::size_t dot = path.starts_with("--quantize.") ? path.rfind('.') : path.find('.');
  if (!path.starts_with("--") || dot == std::string::npos) return {};
  std::replace(path.begin() + 2, path.end(), '-', '_');
  return std::pair(path.substr(2, dot - 2), path.substr(dot + 1));
}

std::vector<std::string> known_sections() {
  std::vector<std::string> sections;
  for (const Key& key : known_keys()) {
    if (sections.empty() || sections.back() != key.section) sections.emplace_back(key.section);
  }
  return sections;
}

bool is_known_section(std::string_view section) {
  const auto sections = known_sections();
  return std::find(sections.begin(), sections.end(), section) != sections.end() ||
         std::any_of(refused_keys().begin(), refused_keys().end(),
                     [&](const RefusedKey& key) { return key.section == section; });
}

[[noreturn]] void refuse_unknown_section(std::string_view section, const std::string& where) {
  const auto sections = known_sections();
  throw ConfigError(fmt::format("{}: unknown section [{}]{}; the sections are {}", where, section,
                                did_you_mean(section, sections), fmt::join(sections, ", ")));
}

[[noreturn]] void refuse_unknown_key(std::string_view section, std::string_view name, const std::string& where) {
  std::vector<std::string> here;
  for (const Key& key : known_keys()) {
    if (key.name == name) {  // right name, wrong section
      throw ConfigError(fmt::format("{}: unknown key {} (did you mean {}?)", where, key_label(section, name),
                                    key_label(key.section, key.name)));
    }
    if (key.section == section) here.emplace_back(key.name);
  }
  throw ConfigError(fmt::format("{}: unknown key {}{}", where, key_label(section, name), did_you_mean(name, here)));
}

void refuse_unsupported(const RefusedKey& refused, std::string_view name, const GivenValue& given) {
  std::string_view accepted = refused.accepted;
  std::string bare(accepted);
  if (bare.size() >= 2 && bare.front() == '"') bare = bare.substr(1, bare.size() - 2);
  const bool switches_off = refused.name == "*" && given.shown == "false";
  if (switches_off || accepted == kAnyValue) return;
  if (!accepted.empty() && (given.shown == accepted || given.shown == bare)) return;
  throw ConfigError(fmt::format(
      "{}: {} = {} is not supported: {}{}", given.where, key_label(refused.section, name), given.shown, refused.reason,
      accepted.empty() || refused.name == "*" ? "; remove the key"
                                              : fmt::format("; remove the key or set it to {}", accepted)));
}

class Reader {
 public:
  Reader(TrainConfig& config, ConfigProblems& problems) : config_(config), problems_(problems) {}

  /// The keys whose values were rejected.
  const std::set<std::string>& wrong_keys() const { return wrong_keys_; }

  void read_file(std::string_view text, const std::string& source) {
    toml::table root;
    try {
      root = toml::parse(text_after_mark<ConfigError>(text, source), source);
    } catch (const toml::parse_error& error) {
      throw ConfigError(fmt::format("{}:{}:{}: not valid TOML: {}", source, error.source().begin.line,
                                    error.source().begin.column, error.description()));
    }
    for (auto&& [section, node] : root) read_section(std::string(section.str()), node, source);
  }

  void read_section(const std::string& section, const toml::node& node, const std::string& source) {
    const std::string where = fmt::format("{}:{}", source, node.source().begin.line);
    const toml::table* table = node.as_table();
    const bool is_wrong = problems_.collect([&] {
      if (!table) {
        throw ConfigError(
            fmt::format("{}: key '{}' stands outside of any section: write it below a [section] line", where, section));
      }
      if (!is_known_section(section)) refuse_unknown_section(section, where);
    });
    if (is_wrong) return;
    const bool is_off = is_switched_off(section, *table), says_off = is_said_off(*table);
    for (auto&& [name, value] : *table) {
      if (const std::string inner = fmt::format("{}.{}", section, name.str());
          value.is_table() && (kFloat8Section == inner || kFloat8Section.starts_with(inner + "."))) {
        read_section(inner, value, source);
        continue;
      }
      // In a section that is off, an unsupported key has no effect, nor has a choice that does not exist here. If the
      // section says that it is off, no key has. Memory snapshots have their own switch.
      const Key* key = find_key(section, name.str());
      const bool is_choice = key && !key->choices.empty() && value.is_string();
      const bool asks = name.str() == "enable_memory_snapshot" ||
                        !(says_off || (is_off && (is_choice || (!key && find_refused(section, name.str())))));
      if (asks) {
        set_or_collect(section, name.str(), given_from(value, source));
        continue;
      }
      IdleKey idle{.section = section, .name = std::string(name.str())};
      const bool is_read = !idle.problem.collect(
          [&, &name = name, &value = value] { set(section, name.str(), given_from(value, source)); });
      if (!is_read) idle_.push_back(std::move(idle));
    }
    if (says_off) said_off_.insert(section);
  }

  /// Called after the flags. What is trained on conversations has other defaults.
  void take_defaults_of_conversations() {
    if (!trains_on_chats(config_)) return;
    if (!assigned_.contains("training.attn_mask_type")) config_.training.attn_mask_type = "block_causal";
    if (!assigned_.contains("training.packing")) config_.training.packing = "best_fit";
  }

  /// Called after the flags, which may switch a section on. Keys of sections that are off are not read; a note says so.
  void conclude(std::vector<std::string>& notes) {
    std::vector<std::string> not_read;
    for (const IdleKey& key : idle_) {
      if (is_on(key.section)) {
        problems_.collect([&] { key.problem.throw_first(); });
        note_wrong(key.section, key.name);
      } else {
        not_read.push_back(key_label(key.section, key.name));
      }
    }
    for (const std::string& section : said_off_) {
      if (is_on(section)) continue;
      for (const char* name : {"freq", "steps", "local_batch_size", "profiler_active"}) note_wrong(section, name);
    }
    if (config_.checkpoint.load_step >= 0 && !config_.checkpoint.enable) {
      not_read.push_back(key_label("checkpoint", "load_step"));
    }
    if (is_float8_given_ && !uses_float8(config_)) {
      notes.push_back(fmt::format("[{0}] has no effect: [model] converters does not name \"{0}\"", kFloat8Section));
    }
    const auto is_given = [&](std::string_view section) {
      return std::ranges::any_of(assigned_, [&](const std::string& key) { return key.starts_with(section); });
    };
    if (is_given("muon.") && config_.optimizer.name != "Muon") {
      notes.push_back(fmt::format("[muon] has no effect: [optimizer] name is \"{}\"", config_.optimizer.name));
    }
    if (is_given("ema.") && config_.ema.decay == 0) notes.push_back("[ema] has no effect: decay is 0");
    if (config_.profiling.record_kernels && !config_.profiling.enable_profiling) {
      notes.push_back("[profiling] record_kernels has no effect: enable_profiling is not set");
    }
    if (!not_read.empty()) {
      notes.push_back(fmt::format("not read, as {} off: {}",
                                  not_read.size() == 1 ? "its section is switched" : "their sections are switched",
                                  fmt::join(not_read, ", ")));
    }
    if (sequence_ && *sequence_->number != config_.training.seq_len && config_.validation.enable) {
      problems_.collect([&] {
        throw ConfigError(
            fmt::format("{}: [validation] seq_len = {} is not supported: validation uses "
                        "training.seq_len, which is {}; remove the key",
                        sequence_->where, *sequence_->number, config_.training.seq_len));
      });
    }
    notes.insert(notes.end(), twice_.begin(), twice_.end());
    for (const auto& [section, line] : without_effect_) {
      if (section != "checkpoint" || config_.checkpoint.enable) notes.push_back(line);
    }
  }

  void take_preset(const Preset& preset) {
    for (const PresetValue& value : preset.values) {
      set(value.section, value.name,
          {.value = std::string(value.text),
           .shown = std::string(value.text),
           .where = fmt::format("--like {}", preset.name),
           .from_flag = true});
    }
    given_.clear();  // the file may override it
  }

  void read_flags(const std::vector<std::string>& flags) {
    given_.clear();  // a flag may override the file
    for (std::size_t i = 0; i < flags.size(); ++i) {
      const std::string& flag = flags[i];
      const std::size_t equals = flag.find('=');
      std::string path = flag.substr(0, equals);
      const auto split = split_flag(path);
      if (!split) {
        throw UsageError(fmt::format("unexpected argument '{}': overrides are written --section.key value", flag));
      }
      auto [section, name] = *split;
      if (!is_known_section(section)) refuse_unknown_section(section, path);

      GivenValue given{.where = path, .from_flag = true};
      if (equals == std::string::npos && is_negated(section, name)) {
        name = name.substr(3);
        given.shown = "false";
      } else if (equals != std::string::npos) {
        given.shown = flag.substr(equals + 1);
      } else if (is_boolean(section, name) && (i + 1 == flags.size() || !is_boolean_text(flags[i + 1]))) {
        given.shown = "true";
      } else if (i + 1 < flags.size()) {
        given.shown = flags[++i];
      } else {
        if (!find_key(section, name) && !find_refused(section, name)) refuse_unknown_key(section, name, path);
        throw UsageError(fmt::format("{} needs a value", path));
      }
      given.value = given.shown;
      given_.clear();  // a later flag may override an earlier one
      take_flag(path, section, name, std::move(given));
    }
  }

 private:
  /// A key of a section that is off, whose value is not valid.
  struct IdleKey {
    std::string section, name;
    ConfigProblems problem = {};
  };
  struct SequenceLength {
    std::optional<std::int64_t> number;
    std::string where;
  };
  struct Flag {
    std::string path, shown, value;
  };

  static bool is_said_off(const toml::table& table) {
    for (const char* name : {"enable", "enabled", "enable_profiling", "enable_checkpoint"}) {
      if (const auto* value = table.get_as<bool>(name)) return !value->get();
    }
    return false;
  }

  bool is_on(std::string_view section) const {
    if (section == "validation") return config_.validation.enable;
    if (section == "checkpoint") return config_.checkpoint.enable;
    if (section == "profiling") return config_.profiling.enable_profiling;
    if (section == kFloat8Section || section == "float8") return uses_float8(config_);
    return section == "activation_checkpoint" && config_.activation_checkpoint.mode != "none";
  }

  /// Also notes a key that is given twice with two values.
  void take_flag(const std::string& path, std::string_view section, std::string_view name, GivenValue given) {
    const std::string shown = given.shown;
    if (!set_or_collect(section, name, std::move(given))) return;
    const Key* key = find_key(section, name);
    if (!key) return;
    const std::string value = toml_value(key->slot(config_));
    if (const auto before = flags_.find(key); before != flags_.end() && before->second.value != value) {
      twice_.push_back(fmt::format("given twice: {} {} and {} {}: the last one, {}, counts", before->second.path,
                                   before->second.shown, path, shown, shown));
    }
    flags_[key] = {.path = path, .shown = shown, .value = value};
  }

  /// Whether the feature of the section is off: the section says so, or says nothing and torchtitan's default is off.
  static bool is_switched_off(std::string_view section, const toml::table& table) {
    for (const char* name : {"enable", "enabled", "enable_profiling", "enable_checkpoint"}) {
      if (table.get_as<bool>(name)) return is_said_off(table);
    }
    if (section == "activation_checkpoint") return table["mode"].value_or(std::string_view()) == "none";
    // Converters are switched on in [model].
    constexpr std::array<std::string_view, 10> kOffByDefault = {
        "compile",   "fault_tolerance", "float8",          "memory_estimation", "mx",
        "profiling", "quantize",        "quantize.linear", kFloat8Section,      "validation"};
    return std::ranges::find(kOffByDefault, section) != kOffByDefault.end();
  }

  /// Returns whether it could be set.
  bool set_or_collect(std::string_view section, std::string_view name, GivenValue given) {
    if (!problems_.collect([&] { set(section, name, std::move(given)); })) return true;
    note_wrong(section, name);
    return false;
  }

  void note_wrong(std::string_view section, std::string_view name) {
    const Key* key = find_key(section, name);
    if (key) wrong_keys_.insert(fmt::format("{}.{}", key->section, key->name));
  }

  void set(std::string_view section, std::string_view name, GivenValue given) {
    const Key* key = find_key(section, name);
    if (!key) {
      const RefusedKey* refused = find_refused(section, name);
      if (!refused) refuse_unknown_key(section, name, given.where);
      if (const auto count = count_in(given); count && section == "validation" && name == "seq_len") {
        sequence_ = SequenceLength{.number = count, .where = given.where};  // compared when training.seq_len is known
        return;
      }
      refuse_unsupported(*refused, name, given);
      if (!refused->said.empty() && given.shown == refused->said) {
        without_effect_.emplace(std::string(section), fmt::format("{} = {} has no effect: {}", key_label(section, name),
                                                                  given.shown, refused->reason));
      }
      return;
    }
    is_float8_given_ |= key->section == kFloat8Section;
    const auto [before, is_new] = given_.emplace(key, given.where);
    if (!is_new) {
      throw ConfigError(fmt::format("{}: {} sets {} again, after {}", given.where, key_label(section, name),
                                    key_label(key->section, key->name), before->second));
    }
    assigned_.insert(fmt::format("{}.{}", key->section, key->name));
    assign(config_, *key, std::move(given));
  }

  TrainConfig& config_;
  ConfigProblems& problems_;
  std::map<const Key*, std::string> given_;
  std::set<std::string> wrong_keys_, assigned_;
  std::vector<IdleKey> idle_;
  std::set<std::string> said_off_;
  std::optional<SequenceLength> sequence_;
  std::map<const Key*, Flag> flags_;
  std::vector<std::string> twice_;
  bool is_float8_given_ = false;
  std::multimap<std::string, std::string> without_effect_;  // lines, by section
};

/// Takes `--like NAME` out of the flags.
const Preset* take_preset_flag(std::vector<std::string>& flags) {
  constexpr std::string_view kFlag = "--like";
  const Preset* preset = nullptr;
  for (auto flag = flags.begin(); flag != flags.end();) {
    const bool has_value = flag->starts_with(std::string(kFlag) + "=");
    if (!has_value && *flag != kFlag) {
      ++flag;
      continue;
    }
    std::vector<std::string> known;
    for (const Preset& one : presets()) known.emplace_back(one.name);
    std::string name = has_value ? flag->substr(kFlag.size() + 1) : "";
    flag = flags.erase(flag);
    if (!has_value && flag != flags.end()) {
      name = *flag;
      flag = flags.erase(flag);
    }
    const auto found = std::ranges::find(presets(), name, &Preset::name);
    if (found == presets().end()) {
      throw UsageError(
          fmt::format("--like is '{}': expected one of {}{}", name, fmt::join(known, ", "), did_you_mean(name, known)));
    }
    preset = &*found;
  }
  return preset;
}

}  // namespace

bool is_boolean_flag(std::string_view flag) {
  const auto split = split_flag(std::string(flag));
  return split && (is_negated(split->first, split->second) || is_boolean(split->first, split->second));
}

std::set<std::string> read_keys(TrainConfig& config, std::string_view toml, const std::string& source,
                                const std::vector<std::string>& flags, ConfigProblems& problems,
                                std::vector<std::string>& notes) {
  Reader reader(config, problems);
  std::vector<std::string> overrides = flags;
  if (const Preset* preset = take_preset_flag(overrides)) reader.take_preset(*preset);
  reader.read_file(toml, source);
  reader.read_flags(overrides);
  reader.take_defaults_of_conversations();
  reader.conclude(notes);
  return reader.wrong_keys();
}

}  // namespace phalanx::config
