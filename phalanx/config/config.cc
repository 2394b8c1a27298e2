#include "phalanx/config/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/nearest.h"
#include "phalanx/base/parse_text.h"
#include "phalanx/base/signals.h"
#include "phalanx/config/config_checks.h"
#include "phalanx/config/config_problems.h"
#include "phalanx/config/config_reader.h"
#include "phalanx/config/config_schema.h"
#include "phalanx/config/slot_text.h"

namespace phalanx::config {
namespace {

int stop_signal(const std::string& name) {
  const std::vector<std::string> known{"SIGTERM", "SIGINT",  "SIGHUP",  "SIGUSR1",
                                       "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGURG"};
  if (std::ranges::find(known, name) != known.end()) return *signal_of_name(name);
  throw ConfigError(fmt::format("[checkpoint] stop_signals names '{}'{}: expected some of {}{}", name,
                                did_you_mean(name, known), fmt::join(known, ", "),
                                name == "SIGQUIT" ? "; SIGQUIT has the flight recorder written" : ""));
}

}  // namespace

ConfigReading take_config(std::string_view toml, const std::string& source, const std::vector<std::string>& overrides) {
  ConfigReading reading{.source = source};
  reading.wrong_keys = read_keys(reading.config, toml, source, overrides, reading.problems, reading.notes);
  check_keys_together(reading.config, reading.wrong_keys, reading.problems);
  return reading;
}

TrainConfig parse_config(std::string_view toml, const std::string& source, const std::vector<std::string>& overrides) {
  const ConfigReading reading = take_config(toml, source, overrides);
  reading.problems.throw_if_any(source);
  return reading.config;
}

std::string config_text(const std::string& path) {
  if (std::filesystem::is_directory(path)) {
    throw ConfigError(fmt::format("cannot read the configuration '{}': it is a directory", path));
  }
  if (std::error_code error; std::filesystem::is_fifo(path, error)) {  // only its first reader gets the text
    throw ConfigError(
        fmt::format("cannot read the configuration '{}': it is a pipe, and each rank reads the file for "
                    "itself: write it to a file first",
                    path));
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || (file.peek() != std::ifstream::traits_type::eof() && !(text << file.rdbuf()))) {
    throw ConfigError(fmt::format("cannot read the configuration '{}': {}", path, std::strerror(errno)));
  }
  return text.str();
}

TrainConfig read_config(const std::string& path, const std::vector<std::string>& overrides,
                        std::vector<std::string>* notes) {
  const ConfigReading reading = take_config(config_text(path), path, overrides);
  reading.problems.throw_if_any(path);
  take_notes(reading.notes, notes);
  return reading.config;
}

void take_notes(const std::vector<std::string>& found, std::vector<std::string>* notes) {
  if (notes) {
    *notes = found;
    return;
  }
  static std::set<std::string> said;  // a command may read its file more than once
  for (const std::string& note : found) {
    if (said.insert(note).second) log::warn_once(note);
  }
}

std::vector<int> stop_signals(const TrainConfig& config) {
  std::vector<int> numbers;
  for (const std::string& name : config.checkpoint.stop_signals) numbers.push_back(stop_signal(name));
  return numbers;
}

bool trains_on_chats(const TrainConfig& config) {
  return !config.sft.conversations.empty() || !config.dpo.preferences.empty();
}

Datasets training_datasets(const TrainConfig& config) {
  if (!config.training.datasets.empty() || config.training.dataset_path.empty()) return config.training.datasets;
  return {Dataset{.path = config.training.dataset_path}};
}

std::string in_dump_folder(const TrainConfig& config, const std::string& path) {
  return (std::filesystem::path(config.job.dump_folder) / path).string();  // an absolute path stays as it is
}

std::int64_t recompute_every(const TrainConfig& config) {
  const auto& [mode, option] = config.activation_checkpoint;
  if (mode == "none") return 0;
  return mode == "full" ? 1 : parse_whole<std::int64_t>(option).value_or(1);
}

bool uses_float8(const TrainConfig& config) {
  return std::ranges::any_of(config.model.converters,
                             [](const std::string& name) { return name == kFloat8Section || name == kOldFloat8; });
}

bool uses_op_sac(const TrainConfig& config) {
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

}  // namespace phalanx::config