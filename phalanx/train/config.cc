#include "phalanx/train/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <utility>

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
  const bool section_is_off = refused.name == "*" && name == "enable" && given.shown == "false";
  if (section_is_off || (!accepted.empty() && (given.shown == accepted || given.shown == bare))) return;
  throw ConfigError(fmt::format(
      "{}: {} = {} is not supported: {}{}", given.where, label(refused.section, name), given.shown, refused.reason,
      accepted.empty() || refused.name == "*" ? "; remove the key"
                                              : fmt::format("; remove the key or set it to {}", accepted)));
}

[[noreturn]] void refuse_value(const Key& key, Slot slot, const GivenValue& given) {
  std::string hint;
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
  if (!(value >= key.least && value <= key.most)) refuse_value(key, slot, given);  // NaN is refused too
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
    if (!key.choices.empty() && std::find(key.choices.begin(), key.choices.end(), *text) == key.choices.end()) {
      refuse_value(key, slot, given);
    }
    **p = *text;
  } else if (auto** p = std::get_if<std::vector<std::string>*>(&slot); p && list) {
    **p = *list;
  } else {
    refuse_value(key, slot, given);
  }
}

class Reader {
 public:
  explicit Reader(TrainConfig& config) : config_(config) {}

  void read_file(std::string_view text, const std::string& source) {
    toml::table root;
    try {
      root = toml::parse(text, source);
    } catch (const toml::parse_error& error) {
      throw ConfigError(fmt::format("{}:{}:{}: not valid TOML: {}", source, error.source().begin.line,
                                    error.source().begin.column, error.description()));
    }
    for (auto&& [section, node] : root) {
      const std::string where = fmt::format("{}:{}", source, node.source().begin.line);
      const toml::table* table = node.as_table();
      if (!table) {
        throw ConfigError(fmt::format("{}: key '{}' stands outside of any section: write it below a [section] line",
                                      where, section.str()));
      }
      if (!is_known_section(section.str())) refuse_unknown_section(section.str(), where);
      for (auto&& [name, value] : *table) {
        set(section.str(), name.str(), given_from(value, source));
      }
    }
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
      set(section, name, std::move(given));
    }
  }

 private:
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
  std::map<const Key*, std::string> given_;
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

void refuse_zero(std::string_view section, std::string_view name, std::int64_t value) {
  if (value == 0) {
    throw ConfigError(fmt::format("{} is 0: expected -1, or 1 or more", label(section, name)));
  }
}

int stop_signal(const std::string& name) {
  const std::vector<std::string> known{"SIGTERM", "SIGINT",  "SIGHUP",  "SIGUSR1",
                                       "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGURG"};
  if (std::ranges::find(known, name) != known.end()) return *signal_of_name(name);
  throw ConfigError(fmt::format("[checkpoint] stop_signals names '{}'{}: expected some of {}{}", name,
                                did_you_mean(name, known), fmt::join(known, ", "),
                                name == "SIGQUIT" ? "; SIGQUIT has the flight recorder written" : ""));
}

void resolve(TrainConfig& config) {
  for (const std::string& name : config.checkpoint.stop_signals) stop_signal(name);
  auto& training = config.training;
  take_token_budget("num_tokens_per_microbatch_per_dp_rank", training.num_tokens_per_microbatch_per_dp_rank,
                    training.local_batch_size, training.seq_len);
  take_token_budget("num_tokens_per_train_step", training.num_tokens_per_train_step, training.global_batch_size,
                    training.seq_len);
  refuse_zero("training", "global_batch_size", training.global_batch_size);
  refuse_zero("parallelism", "data_parallel_replicate_degree", config.parallelism.data_parallel_replicate_degree);
  refuse_zero("parallelism", "data_parallel_shard_degree", config.parallelism.data_parallel_shard_degree);
  if (config.parallelism.data_parallel_shard_degree == 1) {
    const auto needs_sharding = [](const std::string& setting) {
      throw ConfigError(fmt::format(
          "{} is for sharded training: set [parallelism] data_parallel_shard_degree to -1 or 2 and more, or remove it",
          setting));
    };
    if (training.mixed_precision_reduce != "float32") {
      needs_sharding(fmt::format("[training] mixed_precision_reduce = \"{}\"", training.mixed_precision_reduce));
    }
    if (training.enable_cpu_offload) needs_sharding("[training] enable_cpu_offload");
    if (reshard_group(config) > 0) {
      needs_sharding(
          fmt::format("[parallelism] fsdp_reshard_after_forward = {}", config.parallelism.fsdp_reshard_after_forward));
    }
  }
  if (const std::int64_t group = reshard_group(config); group > 0 && config.parallelism.zero_stage < 3) {
    throw ConfigError(fmt::format(
        "[parallelism] fsdp_reshard_after_forward = {} is for zero_stage = 3, but that is {}: remove one of them",
        group, config.parallelism.zero_stage));
  }
  refuse_zero("validation", "local_batch_size", config.validation.local_batch_size);
  refuse_zero("validation", "freq", config.validation.freq);
  refuse_zero("validation", "steps", config.validation.steps);
  const auto& profiling = config.profiling;
  if (profiling.profiler_active > profiling.profile_freq) {
    throw ConfigError(
        fmt::format("[profiling] profiler_active is {}, but profile_freq is {}: expected at most as many "
                    "traced steps as there are from one trace to the next",
                    profiling.profiler_active, profiling.profile_freq));
  }
  if (config.comm.save_traces_file_prefix.find('/') != std::string::npos) {
    throw ConfigError(
        fmt::format("[comm] save_traces_file_prefix is \"{}\": expected the beginning of a file's name; "
                    "the folder is save_traces_folder",
                    config.comm.save_traces_file_prefix));
  }
  if (config.checkpoint.initial_load_in_hf && config.checkpoint.initial_load_path.empty() &&
      config.model.hf_assets_path.empty()) {
    throw ConfigError(
        "[checkpoint] initial_load_in_hf is true, but neither initial_load_path nor [model] hf_assets_path is set");
  }
  if (config.checkpoint.initial_random_weights &&
      (config.checkpoint.initial_load_in_hf || !config.checkpoint.initial_load_path.empty())) {
    throw ConfigError(fmt::format(
        "[checkpoint] initial_random_weights is true, but {} says where weights come from: remove one of them",
        config.checkpoint.initial_load_in_hf ? "initial_load_in_hf" : "initial_load_path"));
  }
  if (config.model.flavor == kFlavorOfDirectory && config.model.hf_assets_path.empty()) {
    throw ConfigError("[model] flavor is \"hf\", but hf_assets_path (the folder of config.json) is not set");
  }
  if (!config.metrics.sample_prompt.empty() && config.model.hf_assets_path.empty()) {
    throw ConfigError(
        "[metrics] sample_prompt is set, but [model] hf_assets_path (the folder of tokenizer.json) is not");
  }
  if (config.validation.enable && config.validation.dataset_path.empty() && config.validation.fraction == 0) {
    throw ConfigError("[validation] is enabled, but fraction is 0 and dataset_path is not set: nothing is held out");
  }
}

}  // namespace

TrainConfig parse_config(std::string_view toml, const std::string& source, const std::vector<std::string>& overrides) {
  TrainConfig config;
  Reader reader(config);
  reader.read_file(toml, source);
  reader.read_flags(overrides);
  resolve(config);
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
