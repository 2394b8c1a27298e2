#include "cli/front/plan_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli/front/plan_arguments.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/human.h"
#include "phalanx/config/training_shape.h"
#include "phalanx/plan/bytes_text.h"
#include "phalanx/plan/memory_bars.h"
#include "phalanx/plan/scenario.h"

namespace phalanx::cli {

const std::string_view kPlanHelp =
    R"(usage: phalanx plan (CONFIG.toml | --model NAME|DIRECTORY) --devices LIST [options] [--section.key value ...]

Says whether a model trains on devices, and how: which of three scenarios it is (all of it fits on every device; on the
largest or on none, but each layer does; not even one layer does) with the bytes, the layouts that fit, and one of them
as sections of a configuration. Nothing is allocated, and no device is needed.

      --model NAME         a model by name (debug, 5M, 50M, llama3_8b, ...), or the directory of a
                           Hugging Face model, of which config.json is read
  CONFIG.toml, --config    or the model, batch, sequence and precision of a run's configuration
      --devices LIST       [COUNTx]NAME or [COUNTx]SIZE, joined by commas: 8xH100, 16xA100-40G, 2x24GiB,2x80GiB. Names:
                           A100-80G, A100-40G, H100-80G, H200-141G, B200-180G, L40S-48G, RTX4090-24G; `2xthis`: two
                           ranks on the processors and the free memory of this node
      --nodes N, --per-node N   nodes, and neighbouring devices on one. Default: up to 8 devices are on one node, more
                           on nodes of 8
      --batch N            sequences in a step (training.global_batch_size; default: --local-batch for each device)
      --local-batch N      sequences in one forward pass, at most (training.local_batch_size)
      --seq N              tokens in a sequence (training.seq_len)
      --dtype TYPE         of the matrix products: float32, bfloat16, float16 (training.mixed_precision_param)
      --schedule NAME      of pipelines (1F1B)
      --layout L           this layout in place of all that there are; may be repeated. Parts as for `phalanx verify`:
                           --layout dp_replicate=8 --layout dp_shard=8,zero=1 --layout pp=2,tp=4,ac=op
      --headroom PERCENT   of a device's memory that stays free (5)
      --top N              rows of the table (12)
      --json FILE          all of it, and all layouts, in bytes
      --toml FILE          the recommended sections
      --svg FILE           a picture: what each layout of the table takes of its device, and for what

  phalanx plan --model llama3_8b --devices 8xH100 --dtype bfloat16 --batch 64 --seq 8192
  phalanx plan run.toml --devices 2xthis --toml layout.toml
  phalanx plan --model llama3_1b --devices 4xA100 --layout dp_replicate=4 --layout dp_shard=4 --layout tp=4 \
    --svg bars.svg

Ends with status 1 where no layout fits. How layouts are ordered, and what is assumed: docs/plan.md.
)";

namespace {

using nlohmann::json;
using observe::MemoryCategory;
using plan::bytes_text;

std::string recommended_toml(const PlanArguments& arguments, const plan::Layout& layout) {
  std::set<std::pair<std::string, std::string>> wanted;
  for (const plan::Setting& setting : plan::settings_of(layout)) wanted.emplace(setting.section, setting.key);
  if (arguments.config_path.empty()) wanted.insert({{"model", "name"}, {"model", "flavor"}, {"training", "seq_len"}});
  std::set<std::string> known;  // the existing entries as "[section] line"
  const auto each_line = [](const config::TrainConfig& config, const auto& visit) {
    std::istringstream text(config::print_config(config));
    std::string section;
    for (std::string line; std::getline(text, line);) {
      if (line.starts_with('[')) section = line.substr(1, line.find(']') - 1);
      if (const std::size_t equals = line.find(" = "); equals != std::string::npos && !line.starts_with('#')) {
        visit(section, line.substr(0, equals), line);
      }
    }
  };
  each_line(arguments.reference, [&](const std::string& section, const std::string&, const std::string& line) {
    known.insert(section + line);
  });
  std::string toml, current;
  each_line(with_settings(arguments, layout),
            [&](const std::string& section, const std::string& key, const std::string& line) {
              if (!wanted.contains({section, key}) && known.contains(section + line)) return;
              if (section != current) toml += fmt::format("{}[{}]\n", toml.empty() ? "" : "\n", section);
              current = section;
              toml += line + "\n";
            });
  return toml;
}

json to_json(const plan::TrainingMemory& memory) {
  json object = {{"total", memory.total()}, {"beside_tensors", memory.runtime}};
  for (std::size_t c = 0; c < observe::kMemoryCategories; ++c) {
    object[std::string(observe::name_of(static_cast<MemoryCategory>(c)))] = memory.peak.bytes[c];
  }
  if (memory.on_host > 0) object["on_host"] = memory.on_host;
  for (const auto& [name, bytes] : memory.buffers) object["of_these"][name] = bytes;
  return object;
}

json to_json(const plan::Candidate& candidate) {
  const ParallelPlan& parallel = candidate.layout.parallel;
  return {{"layout", plan::name_of(candidate.layout)},
          {"fits", candidate.fits()},
          {"devices", candidate.devices},
          {"pp", parallel.pp},
          {"dp_replicate", parallel.dp_replicate},
          {"dp_shard", parallel.dp_shard},
          {"cp", parallel.cp},
          {"ep", parallel.ep},
          {"tp", parallel.tp},
          {"zero_stage", parallel.is_sharded() ? parallel.zero_stage : 0},
          {"batch", candidate.layout.batch},
          {"passes", candidate.layout.passes},
          {"memory", to_json(candidate.memory)},
          {"available", candidate.available},
          {"sent_inside", candidate.comm_volume.intra_node},
          {"sent_across", candidate.comm_volume.inter_node}};
}

void print_memory(const char* name, const plan::TrainingMemory& memory) {
  fmt::print("  {:<22}", name);
  for (const std::int64_t bytes : memory.peak.bytes) fmt::print(" {:>11}", bytes_text(bytes));
  fmt::print(" {:>11} {:>11}\n", bytes_text(memory.runtime), bytes_text(memory.total()));
}

std::string model_text(const config::TrainConfig& config) {
  return config.model.flavor == config::kFlavorOfDirectory ? config.model.hf_assets_path : config.model.flavor;
}

std::string step_text(const config::TrainConfig& config) {
  return fmt::format("sequences of {} tokens, {}, {}", config.training.seq_len, config.training.mixed_precision_param,
                     config.optimizer.name);
}

void print_scenario(const PlanArguments& arguments, const plan::TrainingShape& base, const plan::Scenario& scenario) {
  fmt::print("model    {}: {} parameters, {} blocks of width {}, vocabulary {}\n", model_text(arguments.config),
             human_count(static_cast<double>(base.model.parameter_count())), base.model.n_layers, base.model.dim,
             base.model.vocab_size);
  fmt::print("devices  {}, {:.3g} % of each left free\n", arguments.devices.text(), 100 * arguments.headroom);
  fmt::print("step     {}\n\n", step_text(arguments.config));
  fmt::print("scenario {}: {}\n  {}\n\n", scenario.number, scenario.methods, scenario.reason);
  fmt::print("  {:<22} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11}\n", "on one device", "parameters", "gradients",
             "optimizer", "activations", "buffers", "beside", "total");
  print_memory("whole model", scenario.whole);
  print_memory("  recomputing", scenario.whole_recomputed);
  const plan::LayerNeed& layer = scenario.layer;
  fmt::print("  {:<22} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11}\n", "largest layer", bytes_text(layer.weights),
             bytes_text(layer.gradients), "-", bytes_text(layer.activations), "-", "-", bytes_text(layer.total()));
  fmt::print("  (the {}, {} parameters; its optimizer state, {}, may be elsewhere)\n\n", layer.name,
             human_count(static_cast<double>(layer.parameters)), bytes_text(layer.optimizer));
}

/// The rows of the table and the picture: the given layouts, or the first ones that fit.
std::vector<plan::Candidate> rows_of(const std::vector<plan::Candidate>& candidates, const PlanArguments& arguments) {
  if (!arguments.layouts.empty()) return candidates;
  std::vector<plan::Candidate> rows;
  for (const plan::Candidate& candidate : candidates) {
    if (candidate.fits() && rows.size() < arguments.max_rows) rows.push_back(candidate);
  }
  return rows;
}

void print_candidates(const std::vector<plan::Candidate>& candidates, const PlanArguments& arguments) {
  const bool given = !arguments.layouts.empty();
  const std::size_t most = arguments.max_rows;
  const auto fitting = static_cast<std::size_t>(std::ranges::count_if(candidates, &plan::Candidate::fits));
  fmt::print("{} of {} layouts fit{}\n", fitting, candidates.size(),
             fitting > most && !given ? fmt::format("; the first {} (all: --top {}):", most, fitting)
             : fitting > 0 || given   ? ":"
                                      : "");
  if (fitting == 0 && !given) return;
  fmt::print("  {:<46} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11}{}\n", "layout, bytes a device",
             "parameters", "gradients", "optimizer", "activations", "buffers", "total", "sent a step", "to others",
             given ? "     missing" : "");
  for (const plan::Candidate& candidate : rows_of(candidates, arguments)) {
    fmt::print("  {:<46}", plan::name_of(candidate.layout));
    for (const std::int64_t bytes : candidate.memory.peak.bytes) fmt::print(" {:>11}", bytes_text(bytes));
    const std::int64_t total = candidate.memory.total();
    fmt::print(" {:>11} {:>11} {:>11}", bytes_text(total), bytes_text(candidate.comm_volume.intra_node),
               bytes_text(candidate.comm_volume.inter_node));
    if (given) fmt::print(" {:>11}", candidate.fits() ? "-" : bytes_text(total - candidate.available));
    fmt::print("\n");
  }
  for (const plan::Candidate& candidate : rows_of(candidates, arguments)) {
    if (candidate.layout.exchange_reason.empty()) continue;
    fmt::print("  {}, by a cost model: {}\n", plan::name_of(candidate.layout), candidate.layout.exchange_reason);
  }
  fmt::print("\n");
}

void print_recommended(const plan::TrainingShape& base, const std::vector<plan::Candidate>& candidates,
                       const plan::Candidate& chosen, const std::string& toml) {
  const plan::Layout& layout = chosen.layout;
  fmt::print("recommended: {}, {} on each of {} devices, which have {}\n", plan::name_of(layout),
             bytes_text(chosen.memory.total()), chosen.devices, bytes_text(chosen.available));
  const plan::ActivationChoices choices = plan::activation_choices(base, layout);
  fmt::print(
      "  activations: {} where nothing is computed again, {} with costly operations kept, {} with nothing kept\n",
      bytes_text(choices.none), bytes_text(choices.op), bytes_text(choices.full));
  const std::vector<std::string> before = plan::reasons(candidates, chosen);
  fmt::print("  why: {}\n", before.empty() ? "it is the first of all in the order of docs/plan.md"
                                           : "the first that fits; before it would come");
  for (const std::string& line : before) fmt::print("    {}\n", line);
  fmt::print("\n{}", toml);
}

/// If no layout fits, it shows the nearest ones.
std::string picture(const PlanArguments& arguments, const std::vector<plan::Candidate>& candidates,
                    std::int64_t global) {
  std::vector<plan::Candidate> rows = rows_of(candidates, arguments);
  if (rows.empty()) {
    rows = candidates;
    std::ranges::stable_sort(rows, {}, [](const plan::Candidate& one) { return one.memory.total() - one.available; });
    rows.resize(std::min(rows.size(), arguments.max_rows));
  }
  return plan::memory_bars(rows, {.title = fmt::format("Peak memory of a rank: {} on {}", model_text(arguments.config),
                                                       arguments.devices.text()),
                                  .detail = fmt::format("{}, {} a step", step_text(arguments.config), global),
                                  .headroom = arguments.headroom});
}

}  // namespace

int plan_command(const Arguments& words) {
  const PlanArguments arguments = parse_plan_arguments(words);
  const auto& training = arguments.config.training;
  plan::TrainingShape base = config::shape_without_layout(arguments.config);
  base.on_device = base.over_nccl = !arguments.devices.is_host;
  base.shares_memory = arguments.devices.is_host;
  const std::int64_t count = arguments.devices.count();
  const std::int64_t global =
      training.global_batch_size == -1 ? training.local_batch_size * count : training.global_batch_size;
  const plan::Scenario scenario = plan::find_scenario(base, arguments.devices, arguments.headroom);
  const plan::SearchOptions options{.base = base,
                                    .devices = arguments.devices,
                                    .global_batch = global,
                                    .max_batch = training.local_batch_size,
                                    .headroom = arguments.headroom,
                                    .schedule = arguments.config.parallelism.pipeline_parallel_schedule};
  const bool given = !arguments.layouts.empty();
  const auto candidates = given ? given_layouts(arguments, options) : plan::search_layouts(options);
  const auto ordered = plan::best_first(candidates);
  const plan::Candidate* const chosen = plan::recommended(ordered);
  const std::string toml = chosen != nullptr ? recommended_toml(arguments, chosen->layout) : "";

  print_scenario(arguments, base, scenario);
  print_candidates(candidates, arguments);
  if (chosen != nullptr) print_recommended(base, ordered, *chosen, toml);
  if (!arguments.toml.empty() && chosen != nullptr) write_file(arguments.toml, toml);
  if (!arguments.svg.empty()) write_file(arguments.svg, picture(arguments, candidates, global));
  if (!arguments.json.empty()) {
    const plan::LayerNeed& layer = scenario.layer;
    json all = {{"scenario", scenario.number},
                {"methods", scenario.methods},
                {"reason", scenario.reason},
                {"devices", arguments.devices.text()},
                {"global_batch", global},
                {"seq_len", training.seq_len},
                {"parameters", base.model.parameter_count()},
                {"whole_model", to_json(scenario.whole)},
                {"whole_model_recomputing", to_json(scenario.whole_recomputed)},
                {"largest_layer",
                 {{"name", layer.name},
                  {"parameters", layer.weights},
                  {"gradients", layer.gradients},
                  {"optimizer", layer.optimizer},
                  {"activations", layer.activations},
                  {"total", layer.total()}}},
                {"recommended", chosen != nullptr ? json(plan::name_of(chosen->layout)) : json()},
                {"toml", toml}};
    for (const plan::Candidate& candidate : candidates) all["layouts"].push_back(to_json(candidate));
    write_file(arguments.json, all.dump(2) + "\n");
  }
  if (chosen != nullptr) return 0;
  const auto least = std::ranges::min_element(
      candidates, {}, [](const plan::Candidate& one) { return one.memory.total() - one.available; });
  throw Error(
      fmt::format("no layout fits: {} comes nearest and needs {} of {}; use more or larger devices, shorter "
                  "sequences or a smaller model",
                  plan::name_of(least->layout), bytes_text(least->memory.total()), bytes_text(least->available)));
}

}  // namespace phalanx::cli
