#include "phalanx/train/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/dtype_names.h"
#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/base/signals.h"
#include "phalanx/train/config_schema.h"

namespace phalanx::train {
namespace {

// A value as somebody wrote it, in the file or on the command line.
struct GivenValue {
  std::variant<std::monostate, bool, std::int64_t, double, std::string, std::vector<std::string>> value;
  std::string shown;  // as in the file
  std::string where;  // "llama.toml:12" or "--training.steps"
  bool from_flag = false;
};

std::string label(std::string_view section, std::string_view name) { return fmt::format("[{}] {}", section, name); }

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
      throw ConfigError(fmt::format("{}: unknown key {} (did you mean {}?)", where, label(section, name),
                                    label(key.section, key.name)));
    }
    if (key.section == section) here.emplace_back(key.name);
  }
  throw ConfigError(fmt::format("{}: unknown key {}{}", where, label(section, name), did_you_mean(name, here)));
}

void refuse_unsupported(const RefusedKey& refused, std::string_view name, const GivenValue& given) {
  std::string_view accepted = refused.accepted;
  std::string bare(accepted);
  if (bare.size() >= 2 && bare.front() == '"') bare = bare.substr(1, bare.size() - 2);
  const bool switches_off = refused.name == "*" && (name == "enable" || name == "enabled") && given.shown == "false";
  if (switches_off || accepted == kAnyValue) return;
  if (!accepted.empty() && (given.shown == accepted || given.shown == bare)) return;
  throw ConfigError(fmt::format(
      "{}: {} = {} is not supported: {}{}", given.where, label(refused.section, name), given.shown, refused.reason,
      accepted.empty() || refused.name == "*" ? "; remove the key"
                                              : fmt::format("; remove the key or set it to {}", accepted)));
}

[[noreturn]] void refuse_value(const Key& key, Slot slot, const GivenValue& given, std::string hint = "") {
  if (!key.choices.empty()) {
    hint = did_you_mean(given.shown, std::vector<std::string>(key.choices.begin(), key.choices.end()));
  }
  throw ConfigError(fmt::format("{}: {} is {}: expected {}{}", given.where, label(key.section, key.name), given.shown,
                                expectation(key, slot), hint));
}

template <class T>
std::optional<T> parse_whole(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

/// "a,b" as a list; brackets and quotes, as in a file, may stand around.
std::vector<std::string> split_list(std::string_view text) {
  const auto strip = [](std::string_view part, std::string_view first, std::string_view last) {
    while (part.starts_with(' ')) part.remove_prefix(1);
    while (part.ends_with(' ')) part.remove_suffix(1);
    const bool is_wrapped = part.size() >= 2 && first.find(part.front()) != first.npos &&
                            last.find(part.back()) == first.find(part.front());
    return is_wrapped ? part.substr(1, part.size() - 2) : part;
  };
  text = strip(text, "[", "]");
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    if (const auto part = strip(text.substr(0, comma), "\"'", "\"'"); !part.empty()) parts.emplace_back(part);
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return parts;
}

// A flag's text takes the type of its key.
void give_type(GivenValue& given, std::string_view type) {
  const std::string text = std::get<std::string>(given.value);
  if (type == "boolean") {
    if (text == "true" || text == "false") given.value = text == "true";
  } else if (type == "integer") {
    if (auto value = parse_whole<std::int64_t>(text)) given.value = *value;
  } else if (type == "number") {
    if (auto value = parse_whole<double>(text)) given.value = *value;
  } else if (type == "list of strings") {
    given.value = split_list(text);
  }
}

void check_range(const Key& key, Slot slot, double value, const GivenValue& given) {
  if (std::isinf(value)) refuse_value(key, slot, given, ", and not infinite");
  if (!(value >= key.least && value <= key.most)) refuse_value(key, slot, given);  // NaN is refused too
}

/// The value that a key takes for the one that was written: another name of a type, or torchtitan's name.
std::string known_value(const Key& key, const std::string& text) {
  const auto is_choice = [&](std::string_view value) {
    return std::find(key.choices.begin(), key.choices.end(), value) != key.choices.end();
  };
  if (is_choice(text)) return text;
  for (const ValueAlias& alias : value_aliases()) {
    if (alias.section == key.section && alias.name == key.name && alias.written == text) {
      return std::string(alias.meant);
    }
  }
  const std::string dtype = canonical_dtype(text);
  return is_choice(dtype) ? dtype : text;
}

/// An integer from 1 on, also one that was written as text.
std::optional<std::int64_t> count_in(const GivenValue& given) {
  std::optional<std::int64_t> count;
  if (const auto* integer = std::get_if<std::int64_t>(&given.value)) count = *integer;
  if (const auto* text = std::get_if<std::string>(&given.value)) count = parse_whole<std::int64_t>(*text);
  return count && *count >= 1 ? count : std::nullopt;
}

void assign(TrainConfig& config, const Key& key, GivenValue given) {
  Slot slot = key.slot(config);
  if (given.from_flag) give_type(given, type_name(slot));
  const auto* boolean = std::get_if<bool>(&given.value);
  const auto* integer = std::get_if<std::int64_t>(&given.value);
  const auto* number = std::get_if<double>(&given.value);
  const auto* text = std::get_if<std::string>(&given.value);
  const auto* list = std::get_if<std::vector<std::string>>(&given.value);
  const bool is_number = number || integer;
  const double as_number = number ? *number : integer ? static_cast<double>(*integer) : 0.0;

  if (auto** p = std::get_if<bool*>(&slot); p && boolean) {
    **p = *boolean;
  } else if (auto** p = std::get_if<std::string*>(&slot); p && !key.or_count.empty() && count_in(given)) {
    **p = fmt::format("{}", *count_in(given));
  } else if (auto** p = std::get_if<std::optional<bool>*>(&slot); p && boolean) {
    **p = *boolean;
  } else if (auto** p = std::get_if<std::int64_t*>(&slot); p && integer) {
    check_range(key, slot, static_cast<double>(*integer), given);
    **p = *integer;
  } else if (auto** p = std::get_if<double*>(&slot); p && is_number) {
    check_range(key, slot, as_number, given);
    **p = as_number;
  } else if (auto** p = std::get_if<std::optional<double>*>(&slot); p && is_number) {
    check_range(key, slot, as_number, given);
    **p = as_number;
  } else if (auto** p = std::get_if<std::string*>(&slot); p && text) {
    const std::string value = key.choices.empty() ? *text : known_value(key, *text);
    if (!key.choices.empty() && std::find(key.choices.begin(), key.choices.end(), value) == key.choices.end()) {
      refuse_value(key, slot, given);
    }
    **p = value;
  } else if (auto** p = std::get_if<std::vector<std::string>*>(&slot); p && list) {
    **p = *list;
  } else {
    refuse_value(key, slot, given);
  }
}

/// What is wrong with a configuration, all of it, so that one report tells it.
class Problems {
 public:
  /// Runs what may throw a ConfigError, and keeps its text. Whether it threw.
  template <class Check>
  bool collect(Check&& check) {
    try {
      check();
      return false;
    } catch (const ConfigError& error) {
      texts_.emplace_back(error.what());
      return true;
    }
  }
  void throw_if_any(const std::string& source) const {
    if (texts_.empty()) return;
    if (texts_.size() == 1) throw ConfigError(texts_[0]);
    throw ConfigError(fmt::format("{}: {} problems\n  {}", source, texts_.size(), fmt::join(texts_, "\n  ")));
  }

 private:
  std::vector<std::string> texts_;
};

class Reader {
 public:
  Reader(TrainConfig& config, Problems& problems) : config_(config), problems_(problems) {}

  /// The keys whose values were not taken.
  const std::set<std::string>& wrong_keys() const { return wrong_keys_; }

  void read_file(std::string_view text, const std::string& source) {
    toml::table root;
    try {
      root = toml::parse(text_after_mark<ConfigError>(text, source), source);
    } catch (const toml::parse_error& error) {
      throw ConfigError(fmt::format("{}:{}:{}: not valid TOML: {}", source, error.source().begin.line,
                                    error.source().begin.column, error.description()));
    }
    for (auto&& [section, node] : root) {
      const std::string where = fmt::format("{}:{}", source, node.source().begin.line);
      const toml::table* table = node.as_table();
      const bool is_wrong = problems_.collect([&, &section = section] {
        if (!table) {
          throw ConfigError(fmt::format("{}: key '{}' stands outside of any section: write it below a [section] line",
                                        where, section.str()));
        }
        if (!is_known_section(section.str())) refuse_unknown_section(section.str(), where);
      });
      if (is_wrong) continue;
      const bool is_off = is_switched_off(section.str(), *table);
      for (auto&& [name, value] : *table) {
        // Where a section is off, what is not supported in it asks for nothing; memory snapshots have their own switch.
        const bool asks = !is_off || name.str() == "enable_memory_snapshot";
        const Key* key = find_key(section.str(), name.str());
        if (!asks && !key && find_refused(section.str(), name.str())) continue;
        // Nor does a choice that there is not here.
        if (!asks && key && !key->choices.empty() && value.is_string()) {
          Problems ignored;
          ignored.collect([&, &name = name, &value = value, &section = section] {
            set(section.str(), name.str(), given_from(value, source));
          });
          continue;
        }
        set_or_collect(section.str(), name.str(), given_from(value, source));
      }
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
    given_.clear();  // the file may overrule it
  }

  void read_flags(const std::vector<std::string>& flags) {
    given_.clear();  // a flag may overrule the file
    for (std::size_t i = 0; i < flags.size(); ++i) {
      const std::string& flag = flags[i];
      const std::size_t equals = flag.find('=');
      std::string path = flag.substr(0, equals);
      const std::size_t dot = path.find('.');
      if (path.rfind("--", 0) != 0 || dot == std::string::npos) {
        throw UsageError(fmt::format("unexpected argument '{}': overrides are written --section.key value", flag));
      }
      std::string section = path.substr(2, dot - 2);
      std::string name = path.substr(dot + 1);
      std::replace(section.begin(), section.end(), '-', '_');
      std::replace(name.begin(), name.end(), '-', '_');
      if (!is_known_section(section)) refuse_unknown_section(section, path);

      GivenValue given{.where = path, .from_flag = true};
      if (equals == std::string::npos && name.rfind("no_", 0) == 0 && is_boolean(section, name.substr(3))) {
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
      given_.clear();  // and a later flag an earlier one
      set_or_collect(section, name, std::move(given));
    }
  }

 private:
  /// Whether what the section describes is off: it says so, or says nothing and that is torchtitan's default.
  static bool is_switched_off(std::string_view section, const toml::table& table) {
    for (const char* name : {"enable", "enabled", "enable_profiling", "enable_checkpoint"}) {
      if (const auto* value = table.get_as<bool>(name)) return !value->get();
    }
    if (section == "activation_checkpoint") return table["mode"].value_or(std::string_view()) == "none";
    // Converters are switched on in [model].
    constexpr std::array<std::string_view, 8> kOffByDefault = {
        "compile", "fault_tolerance", "float8", "memory_estimation", "mx", "profiling", "quantize", "validation"};
    return std::ranges::find(kOffByDefault, section) != kOffByDefault.end();
  }

  void set_or_collect(std::string_view section, std::string_view name, GivenValue given) {
    if (problems_.collect([&] { set(section, name, std::move(given)); })) {
      const Key* key = find_key(section, name);
      if (key) wrong_keys_.insert(fmt::format("{}.{}", key->section, key->name));
    }
  }

  static bool is_boolean_text(std::string_view text) { return text == "true" || text == "false"; }

  bool is_boolean(std::string_view section, std::string_view name) {
    const Key* key = find_key(section, name);
    if (key) return type_name(key->slot(config_)) == "boolean";
    const RefusedKey* refused = find_refused(section, name);
    return refused && (is_boolean_text(refused->accepted) || name == "enable");
  }

  static GivenValue given_from(const toml::node& node, const std::string& source) {
    GivenValue given;
    given.where = fmt::format("{}:{}", source, node.source().begin.line);
    if (const auto* v = node.as_boolean()) {
      given.value = v->get();
      given.shown = v->get() ? "true" : "false";
    } else if (const auto* v = node.as_integer()) {
      given.value = v->get();
      given.shown = fmt::format("{}", v->get());
    } else if (const auto* v = node.as_floating_point()) {
      given.value = v->get();
      given.shown = fmt::format("{}", v->get());
    } else if (const auto* v = node.as_string()) {
      given.value = v->get();
      given.shown = fmt::format("\"{}\"", v->get());
    } else if (const auto* v = node.as_array()) {
      given.shown = v->empty() ? "[]" : "a list";
      std::vector<std::string> strings;
      for (const toml::node& one : *v) {
        if (const auto* text = one.as_string()) strings.push_back(text->get());
      }
      if (strings.size() == v->size()) given.value = std::move(strings);
    } else {
      given.shown = node.is_table() ? "a table" : "a date or time";
    }
    return given;
  }

  void set(std::string_view section, std::string_view name, GivenValue given) {
    const Key* key = find_key(section, name);
    if (!key) {
      const RefusedKey* refused = find_refused(section, name);
      if (!refused) refuse_unknown_key(section, name, given.where);
      refuse_unsupported(*refused, name, given);
      return;
    }
    const auto [before, is_new] = given_.emplace(key, given.where);
    if (!is_new) {
      throw ConfigError(fmt::format("{}: {} sets {} again, after {}", given.where, label(section, name),
                                    label(key->section, key->name), before->second));
    }
    assign(config_, *key, std::move(given));
  }

  TrainConfig& config_;
  Problems& problems_;
  std::map<const Key*, std::string> given_;
  std::set<std::string> wrong_keys_;
};

void take_token_budget(std::string_view tokens_name, std::int64_t& tokens, std::int64_t& sequences,
                       std::int64_t seq_len) {
  if (tokens == -1) return;
  if (tokens < 1 || tokens % seq_len != 0) {
    throw ConfigError(fmt::format("[training] {} is {}: expected a multiple of seq_len {}, such as {}", tokens_name,
                                  tokens, seq_len, std::max<std::int64_t>(1, tokens / seq_len) * seq_len));
  }
  sequences = tokens / seq_len;
  tokens = -1;
}

int stop_signal(const std::string& name) {
  const std::vector<std::string> known{"SIGTERM", "SIGINT",  "SIGHUP",  "SIGUSR1",
                                       "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGURG"};
  if (std::ranges::find(known, name) != known.end()) return *signal_of_name(name);
  throw ConfigError(fmt::format("[checkpoint] stop_signals names '{}'{}: expected some of {}{}", name,
                                did_you_mean(name, known), fmt::join(known, ", "),
                                name == "SIGQUIT" ? "; SIGQUIT has the flight recorder written" : ""));
}

/// What the keys say together. A check whose own keys were not taken is left out: it would speak of their defaults.
void resolve(TrainConfig& config, const std::set<std::string>& wrong_keys, Problems& problems) {
  const auto check = [&](std::initializer_list<const char*> keys, auto&& body) {
    if (std::ranges::any_of(keys, [&](const char* key) { return wrong_keys.contains(key); })) return;
    problems.collect(body);
  };
  check({"checkpoint.load_step", "checkpoint.enable"}, [&] {
    if (config.checkpoint.load_step < 0 || config.checkpoint.enable) return;
    throw ConfigError(
        fmt::format("[checkpoint] load_step is {}, but enable is false: nothing is loaded then; remove one of them",
                    config.checkpoint.load_step));
  });
  check({"checkpoint.stop_signals"}, [&] {
    for (const std::string& name : config.checkpoint.stop_signals) stop_signal(name);
  });
  auto& training = config.training;
  const auto& parallelism = config.parallelism;
  const auto& validation = config.validation;
  check({"training.seq_len"}, [&] {
    take_token_budget("num_tokens_per_microbatch_per_dp_rank", training.num_tokens_per_microbatch_per_dp_rank,
                      training.local_batch_size, training.seq_len);
  });
  check({"training.seq_len"}, [&] {
    take_token_budget("num_tokens_per_train_step", training.num_tokens_per_train_step, training.global_batch_size,
                      training.seq_len);
  });
  const auto refuse_zero = [&](const char* section, const char* name, std::int64_t value) {
    check({}, [&] {
      if (value == 0) throw ConfigError(fmt::format("{} is 0: expected -1, or 1 or more", label(section, name)));
    });
  };
  refuse_zero("training", "global_batch_size", training.global_batch_size);
  refuse_zero("parallelism", "data_parallel_replicate_degree", parallelism.data_parallel_replicate_degree);
  refuse_zero("parallelism", "data_parallel_shard_degree", parallelism.data_parallel_shard_degree);
  refuse_zero("validation", "local_batch_size", validation.local_batch_size);
  refuse_zero("validation", "freq", validation.freq);
  refuse_zero("validation", "steps", validation.steps);

  const auto needs_sharding = [&](const char* key, bool is_set, const std::string& setting) {
    check({"parallelism.data_parallel_shard_degree", key}, [&] {
      if (parallelism.data_parallel_shard_degree != 1 || !is_set) return;
      throw ConfigError(fmt::format(
          "{} is for sharded training: set [parallelism] data_parallel_shard_degree to -1 or 2 and more, or remove it",
          setting));
    });
  };
  needs_sharding("training.mixed_precision_reduce", training.mixed_precision_reduce != "float32",
                 fmt::format("[training] mixed_precision_reduce = \"{}\"", training.mixed_precision_reduce));
  needs_sharding("training.enable_cpu_offload", training.enable_cpu_offload, "[training] enable_cpu_offload");
  needs_sharding("parallelism.fsdp_reshard_after_forward", reshard_group(config) > 0,
                 fmt::format("[parallelism] fsdp_reshard_after_forward = {}", parallelism.fsdp_reshard_after_forward));
  needs_sharding(
      "parallelism.fsdp_reduce_each_microbatch", parallelism.fsdp_reduce_each_microbatch != "default",
      fmt::format("[parallelism] fsdp_reduce_each_microbatch = \"{}\"", parallelism.fsdp_reduce_each_microbatch));
  check(
      {"parallelism.fsdp_reduce_each_microbatch", "parallelism.zero_stage", "parallelism.pipeline_parallel_degree"},
      [&] {
        if (parallelism.fsdp_reduce_each_microbatch != "always" || reduces_each_microbatch(config)) return;
        throw ConfigError(fmt::format(
            "[parallelism] fsdp_reduce_each_microbatch = \"always\" is for zero_stage = 2 or 3 without a pipeline, but "
            "{}: gradients stay whole until the step ends there; remove one of them",
            parallelism.zero_stage == 1
                ? std::string("zero_stage = 1")
                : fmt::format("pipeline_parallel_degree = {}", parallelism.pipeline_parallel_degree)));
      });
  check({"parallelism.fsdp_reshard_after_forward", "parallelism.zero_stage"}, [&] {
    const std::int64_t group = reshard_group(config);
    if (group == 0 || parallelism.zero_stage == 3) return;
    throw ConfigError(fmt::format(
        "[parallelism] fsdp_reshard_after_forward = {} is for zero_stage = 3, but that is {}: remove one of them",
        group, parallelism.zero_stage));
  });
  check({"profiling.profiler_active", "profiling.profile_freq"}, [&] {
    const auto& profiling = config.profiling;
    if (profiling.profiler_active <= profiling.profile_freq) return;
    throw ConfigError(
        fmt::format("[profiling] profiler_active is {}, but profile_freq is {}: expected at most as many "
                    "traced steps as there are from one trace to the next",
                    profiling.profiler_active, profiling.profile_freq));
  });
  check({}, [&] {
    if (config.comm.save_traces_file_prefix.find('/') == std::string::npos) return;
    throw ConfigError(
        fmt::format("[comm] save_traces_file_prefix is \"{}\": expected the beginning of a file's name; "
                    "the folder is save_traces_folder",
                    config.comm.save_traces_file_prefix));
  });
  check({"checkpoint.initial_load_path", "model.hf_assets_path"}, [&] {
    if (!config.checkpoint.initial_load_in_hf || !config.checkpoint.initial_load_path.empty() ||
        !config.model.hf_assets_path.empty()) {
      return;
    }
    throw ConfigError(
        "[checkpoint] initial_load_in_hf is true, but neither initial_load_path nor [model] hf_assets_path is set");
  });
  check({"checkpoint.initial_random_weights"}, [&] {
    if (!config.checkpoint.initial_random_weights ||
        (!config.checkpoint.initial_load_in_hf && config.checkpoint.initial_load_path.empty())) {
      return;
    }
    throw ConfigError(fmt::format(
        "[checkpoint] initial_random_weights is true, but {} says where weights come from: remove one of them",
        config.checkpoint.initial_load_in_hf ? "initial_load_in_hf" : "initial_load_path"));
  });
  check({"model.hf_assets_path"}, [&] {
    if (config.model.flavor == kFlavorOfDirectory && config.model.hf_assets_path.empty()) {
      throw ConfigError("[model] flavor is \"hf\", but hf_assets_path (the folder of config.json) is not set");
    }
  });
  check({"model.hf_assets_path"}, [&] {
    if (config.metrics.sample_prompt.empty() || !config.model.hf_assets_path.empty()) return;
    throw ConfigError(
        "[metrics] sample_prompt is set, but [model] hf_assets_path (the folder of tokenizer.json) is not");
  });
  check({"validation.dataset_path", "validation.fraction"}, [&] {
    if (!validation.enable || !validation.dataset_path.empty() || validation.fraction != 0) return;
    throw ConfigError("[validation] is enabled, but fraction is 0 and dataset_path is not set: nothing is held out");
  });
}

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

TrainConfig parse_config(std::string_view toml, const std::string& source, const std::vector<std::string>& overrides) {
  TrainConfig config;
  Problems problems;
  Reader reader(config, problems);
  std::vector<std::string> flags = overrides;
  if (const Preset* preset = take_preset_flag(flags)) reader.take_preset(*preset);
  reader.read_file(toml, source);
  reader.read_flags(flags);
  resolve(config, reader.wrong_keys(), problems);
  problems.throw_if_any(source);
  return config;
}

TrainConfig read_config(const std::string& path, const std::vector<std::string>& overrides) {
  if (std::filesystem::is_directory(path)) {
    throw ConfigError(fmt::format("cannot read the configuration '{}': it is a directory", path));
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || (file.peek() != std::ifstream::traits_type::eof() && !(text << file.rdbuf()))) {
    throw ConfigError(fmt::format("cannot read the configuration '{}': {}", path, std::strerror(errno)));
  }
  return parse_config(text.str(), path, overrides);
}

std::vector<int> stop_signals(const TrainConfig& config) {
  std::vector<int> numbers;
  for (const std::string& name : config.checkpoint.stop_signals) numbers.push_back(stop_signal(name));
  return numbers;
}

std::string in_dump_folder(const TrainConfig& config, const std::string& path) {
  return (std::filesystem::path(config.job.dump_folder) / path).string();  // an absolute path stays as it is
}

std::int64_t recompute_every(const TrainConfig& config) {
  const auto& [mode, option] = config.activation_checkpoint;
  if (mode == "none") return 0;
  return mode == "full" ? 1 : parse_whole<std::int64_t>(option).value_or(1);
}

bool keeps_costly(const TrainConfig& config) {
  return config.activation_checkpoint.mode == "selective" && config.activation_checkpoint.selective_ac_option == "op";
}

bool reshards_after_forward(const TrainConfig& config) {
  const std::string& given = config.parallelism.fsdp_reshard_after_forward;
  return given == "default" ? config.parallelism.pipeline_parallel_degree == 1 : given != "never";
}

bool reduces_each_microbatch(const TrainConfig& config) {
  const TrainConfig::Parallelism& parallelism = config.parallelism;
  const bool can = parallelism.zero_stage > 1 && parallelism.pipeline_parallel_degree == 1;
  return can && parallelism.fsdp_reduce_each_microbatch != "never";
}

std::int64_t reshard_group(const TrainConfig& config) {
  return parse_whole<std::int64_t>(config.parallelism.fsdp_reshard_after_forward).value_or(0);
}

std::string print_config(const TrainConfig& config) {
  TrainConfig copy = config;
  std::string text;
  std::string_view section;
  for (const Key& key : known_keys()) {
    if (key.section != section) {
      text += fmt::format("{}[{}]\n", section.empty() ? "" : "\n", key.section);
      section = key.section;
    }
    const Slot slot = key.slot(copy);
    const std::string value = toml_value(slot);
    const bool converted = key.name.starts_with("num_tokens_") && value == "-1";
    if (converted) continue;
    const bool is_flavors = key.default_text == kFromFlavor && (value == "0" || value == "0.0");
    text += value.empty() || is_flavors ? fmt::format("# {} is not set\n", key.name)
                                        : fmt::format("{} = {}\n", key.name, value);
  }
  return text;
}

}  // namespace phalanx::train
