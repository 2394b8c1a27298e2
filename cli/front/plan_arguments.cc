#include "cli/front/plan_arguments.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <utility>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/base/nearest.h"
#include "phalanx/config/layouts.h"
#include "phalanx/config/torchtitan_keys.h"
#include "phalanx/config/training_shape.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/schedule/generators.h"

namespace phalanx::cli {
namespace {

/// --model: a flavor, or the directory of a Hugging Face model.
void add_model_keys(const std::string& model, std::vector<std::string>& keys) {
  if (std::filesystem::is_directory(model)) {
    keys.push_back(fmt::format("--model.flavor={}", config::kFlavorOfDirectory));
    keys.push_back("--model.hf_assets_path=" + model);
    return;
  }
  if (model.find('/') != std::string::npos) {
    throw UsageError(
        fmt::format("--model '{}' is no directory{}; or name a model such as llama3_8b", model,
                    hub_hint(model).empty() ? ": expected a Hugging Face model's, with config.json" : hub_hint(model)));
  }
  const std::string flavor = config::meant_value("model", "flavor", model);
  const auto family = models::family_of_flavor(flavor);
  if (!family) {
    throw ConfigError(fmt::format("unknown model '{}'{}; known: {}", model,
                                  did_you_mean(flavor, models::all_flavor_names()),
                                  fmt::join(models::all_flavor_names(), ", ")));
  }
  keys.push_back(fmt::format("--model.name={}", models::family_name(*family)));
  keys.push_back("--model.flavor=" + flavor);
}

}  // namespace

PlanArguments parse_plan_arguments(const Arguments& arguments) {
  PlanArguments parsed;
  plan::NodeCounts nodes;
  std::string devices, model, dtype, schedule;
  double headroom = 100 * parsed.headroom;
  CLI::App app;
  app.allow_extras();
  const auto add_number = [&](const char* name, const std::function<void(std::int64_t)>& take) {
    app.add_option_function<std::int64_t>(name, [=](std::int64_t value) {
      require_range(name, value, 1);
      take(value);
    });
  };
  add_number("--nodes", [&](std::int64_t value) { nodes.nodes = value; });
  add_number("--per-node", [&](std::int64_t value) { nodes.per_node = value; });
  add_number("--top", [&](std::int64_t value) { parsed.max_rows = static_cast<std::size_t>(value); });
  app.add_option("--headroom", headroom);
  app.add_option("--json", parsed.json);
  app.add_option("--toml", parsed.toml);
  app.add_option("--svg", parsed.svg);
  add_repeated_option(app, "--layout", parsed.layouts);
  const auto* const given_devices = app.add_option("--devices", devices);
  const auto* const given_model = app.add_option("--model", model);
  const auto* const given_config = app.add_option("--config", parsed.config_path);
  std::vector<std::string> keys;
  for (const auto& [name, key] : {std::pair{"--batch", "training.global_batch_size"},
                                  {"--local-batch", "training.local_batch_size"},
                                  {"--seq", "training.seq_len"}}) {
    add_number(name, [&keys, key = key](std::int64_t value) { keys.push_back(fmt::format("--{}={}", key, value)); });
  }
  const auto* const given_dtype = app.add_option("--dtype", dtype);
  const auto* const given_schedule = app.add_option("--schedule", schedule);
  parsed.overrides = parse_options(app, arguments);

  if (!(headroom >= 0 && headroom < 100)) {
    throw UsageError(
        fmt::format("--headroom is {}: expected percent of a device's memory, from 0 to less than 100", headroom));
  }
  parsed.headroom = headroom / 100;
  if (given_devices->count() == 0) {
    throw UsageError("--devices is missing: expected such as 8xH100, 2x24GiB,2x80GiB or 2xthis");
  }
  parsed.devices = plan::parse_devices(devices, nodes);
  if (!parsed.layouts.empty() && given_schedule->count() > 0) {
    throw UsageError(
        fmt::format("--schedule is for all pipelines that are searched: with --layout, name it there, as in "
                    "pp=2,schedule={}",
                    schedule));
  }
  if (given_model->count() > 0) add_model_keys(model, keys);
  if (given_dtype->count() > 0) keys.push_back("--training.mixed_precision_param=" + dtype);
  if (given_schedule->count() > 0) keys.push_back("--parallelism.pipeline_parallel_schedule=" + schedule);
  if (given_model->count() + given_config->count() == 0) {
    parsed.config_path = take_config_path(parsed.overrides, "plan");
  }
  parsed.overrides.insert(parsed.overrides.begin(), keys.begin(), keys.end());

  if (parsed.config_path.empty()) {
    parsed.config = config::parse_config("", "command line", parsed.overrides);
  } else {
    parsed.config = config::read_config(parsed.config_path, parsed.overrides);
    parsed.reference = config::read_config(parsed.config_path, {});
  }
  schedule::schedule_name(parsed.config.parallelism.pipeline_parallel_schedule);  // throws and names the nearest
  return parsed;
}

std::vector<plan::Candidate> given_layouts(const PlanArguments& arguments, const plan::SearchOptions& options) {
  std::vector<plan::Candidate> candidates;
  for (const std::string& name : arguments.layouts) {
    const config::NamedLayout named = config::with_layout(arguments.config, name, options.devices.count());
    const plan::Layout layout = config::layout_of(named.config, config::plan_run(named.config, named.ranks));
    candidates.push_back(plan::evaluate(options, layout));
  }
  return candidates;
}

config::TrainConfig with_settings(const PlanArguments& arguments, const plan::Layout& layout) {
  std::vector<std::string> words = arguments.overrides;
  for (const plan::Setting& setting : plan::settings_of(layout)) {
    std::string value = setting.value;
    std::erase(value, '"');
    words.push_back(fmt::format("--{}.{}={}", setting.section, setting.key, value));
  }
  return arguments.config_path.empty() ? config::parse_config("", "command line", words)
                                       : config::read_config(arguments.config_path, words);
}

}  // namespace phalanx::cli
