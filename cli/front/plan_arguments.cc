#include "cli/front/plan_arguments.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>

#include "phalanx/base/error.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/config/config_schema.h"
#include "phalanx/config/layouts.h"
#include "phalanx/config/training_shape.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/schedule/generators.h"

namespace phalanx::cli {
namespace {

std::int64_t number_of(const std::string& flag, const std::string& text) {
  std::int64_t value = 0;
  const auto [stopped, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stopped != text.data() + text.size() || value < 1) {
    throw UsageError(fmt::format("{} is '{}': expected a number, 1 or more", flag, text));
  }
  return value;
}

double headroom_of(const std::string& text) {
  char* end = nullptr;
  const double percent = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || *end != '\0' || !(percent >= 0 && percent < 100)) {
    throw UsageError(
        fmt::format("--headroom is '{}': expected percent of a device's memory, from 0 to less than 100", text));
  }
  return percent / 100;
}

/// --model: a flavor, or the directory of a Hugging Face model.
void take_model(const std::string& model, std::vector<std::string>& overrides) {
  if (std::filesystem::is_directory(model)) {
    overrides.push_back(fmt::format("--model.flavor={}", train::kFlavorOfDirectory));
    overrides.push_back("--model.hf_assets_path=" + model);
    return;
  }
  if (model.find('/') != std::string::npos) {
    throw UsageError(
        fmt::format("--model '{}' is no directory{}; or name a model such as llama3_8b", model,
                    hub_hint(model).empty() ? ": expected a Hugging Face model's, with config.json" : hub_hint(model)));
  }
  models::llama_flavor(train::meant_value("model", "flavor", model));  // throws and names the nearest
  overrides.push_back("--model.flavor=" + model);
}

}  // namespace

PlanArguments parse_plan_arguments(Arguments arguments) {
  PlanArguments parsed;
  std::string text, model;
  plan::NodeCounts nodes;
  if (take_option(arguments, "--nodes", text)) nodes.nodes = number_of("--nodes", text);
  if (take_option(arguments, "--per-node", text)) nodes.per_node = number_of("--per-node", text);
  if (take_option(arguments, "--headroom", text)) parsed.headroom = headroom_of(text);
  if (take_option(arguments, "--top", text)) parsed.max_rows = static_cast<std::size_t>(number_of("--top", text));
  take_option(arguments, "--json", parsed.json);
  take_option(arguments, "--toml", parsed.toml);
  take_option(arguments, "--svg", parsed.svg);
  while (take_option(arguments, "--layout", text)) parsed.layouts.push_back(text);
  std::string devices;
  if (!take_option(arguments, "--devices", devices)) {
    throw UsageError("--devices is missing: expected such as 8xH100, 2x24GiB,2x80GiB or 2xthis");
  }
  parsed.devices = plan::parse_devices(devices, nodes);

  const bool has_model = take_option(arguments, "--model", model);
  const bool has_config = take_option(arguments, "--config", parsed.config_path);
  if (has_model) take_model(model, parsed.overrides);
  if (!parsed.layouts.empty() && take_option(arguments, "--schedule", text)) {
    throw UsageError(
        fmt::format("--schedule is for all pipelines that are searched: with --layout, name it there, as in "
                    "pp=2,schedule={}",
                    text));
  }
  // Short option names for configuration keys.
  for (const auto& [flag, key] : {std::pair{"--batch", "training.global_batch_size"},
                                  {"--local-batch", "training.local_batch_size"},
                                  {"--seq", "training.seq_len"}}) {
    if (take_option(arguments, flag, text)) {
      parsed.overrides.push_back(fmt::format("--{}={}", key, number_of(flag, text)));
    }
  }
  for (const auto& [flag, key] : {std::pair{"--dtype", "training.mixed_precision_param"},
                                  {"--schedule", "parallelism.pipeline_parallel_schedule"}}) {
    if (take_option(arguments, flag, text)) parsed.overrides.push_back(fmt::format("--{}={}", key, text));
  }
  if (!has_model && !has_config) parsed.config_path = take_config_path(arguments, "plan");
  parsed.overrides.insert(parsed.overrides.end(), arguments.begin(), arguments.end());

  if (parsed.config_path.empty()) {
    parsed.config = train::parse_config("", "command line", parsed.overrides);
  } else {
    parsed.config = train::read_config(parsed.config_path, parsed.overrides);
    parsed.reference = train::read_config(parsed.config_path, {});
  }
  schedule::schedule_name(parsed.config.parallelism.pipeline_parallel_schedule);  // throws and names the nearest
  return parsed;
}

std::vector<plan::Candidate> given_layouts(const PlanArguments& arguments, const plan::SearchOptions& options) {
  std::vector<plan::Candidate> candidates;
  for (const std::string& name : arguments.layouts) {
    const train::NamedLayout named = train::with_layout(arguments.config, name, options.devices.count());
    const plan::Layout layout = train::layout_of(named.config, train::plan_run(named.config, named.ranks));
    candidates.push_back(plan::evaluate(options, layout));
  }
  return candidates;
}

train::TrainConfig with_settings(const PlanArguments& arguments, const plan::Layout& layout) {
  std::vector<std::string> words = arguments.overrides;
  for (const plan::Setting& setting : plan::settings_of(layout)) {
    std::string value = setting.value;
    std::erase(value, '"');
    words.push_back(fmt::format("--{}.{}={}", setting.section, setting.key, value));
  }
  return arguments.config_path.empty() ? train::parse_config("", "command line", words)
                                       : train::read_config(arguments.config_path, words);
}

}  // namespace phalanx::cli
