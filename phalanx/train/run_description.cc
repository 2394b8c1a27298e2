#include "phalanx/train/run_description.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "phalanx/base/file.h"
#include "phalanx/base/human.h"
#include "phalanx/config/model_config.h"
#include "phalanx/config/run_identity.h"
#include "phalanx/data/data_loader.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/hf_unsupported.h"
#include "phalanx/models/config/llama_json.h"
#include "phalanx/models/config/training_flops.h"
#include "phalanx/nn/expert_capacity.h"
#include "phalanx/report/run_folder.h"
#include "phalanx/train/context_balance.h"
#include "phalanx/train/model/float8_layers.h"
#include "phalanx/train/model/precision.h"

namespace phalanx::train {
namespace {

/// What the loss and the capacity of experts count together.
std::vector<std::string> experts_in_words(const config::TrainConfig& config, const config::RunPlan& plan,
                                          const models::LlamaConfig& model) {
  const auto& training = config.training;
  std::vector<std::string> lines;
  if (training.moe_aux_loss_coeff != 0 && training.moe_aux_loss_unit != "sequence") {
    const bool is_global = training.moe_aux_loss_unit == "global_batch";
    const std::int64_t sequences =
        plan.local_batch_size / plan.micro_batches * (is_global ? plan.parallel.data_parallel_size() : 1);
    lines.push_back(fmt::format("load evened out over {} of a step's {} sequences at a time: a micro-batch{}",
                                sequences, plan.global_batch_size, is_global ? " of every data rank" : ""));
  }
  if (const double factor = training.moe_expert_capacity_factor; factor != 0) {
    lines.push_back(
        fmt::format("each takes the first {} tokens of a sequence that choose it",
                    nn::tokens_of_expert(factor, training.seq_len, model.experts_per_token, model.experts)));
  }
  return lines;
}

}  // namespace

DescriptionLines describe_run(const RunParts& run) {
  const models::LlamaConfig& model = run.model.model().config();
  const auto& training = run.config.training;
  const config::RunPlan& plan = run.plan;
  const std::int64_t data_parallel_size = plan.parallel.data_parallel_size();
  DescriptionLines lines = {
      {"libtorch", TORCH_VERSION},
      {"device",
       fmt::format("{} ({}, {})", run.device.str(), run.device_info.name, human_bytes(run.device_info.total_bytes))},
      {"ranks", fmt::format("{}, backend {}, {} thread{} each", plan.world_size, run.world.backend_name(),
                            at::get_num_threads(), at::get_num_threads() == 1 ? "" : "s")}};
  lines.insert(lines.end(), run.more.begin(), run.more.end());
  lines.emplace_back("model", fmt::format("{} {}: {} parameters, dim {}, {} layers, {}/{} heads, ffn {}, vocabulary {}",
                                          models::family_name(model.family), run.config.model.flavor,
                                          with_commas(run.model.model().parameter_count()), model.dim, model.n_layers,
                                          model.n_heads, model.n_kv_heads, model.ffn_hidden, model.vocab_size));
  if (!run.model.frozen().empty()) {
    const models::TrainedCount count = models::trained_count(model, run.model.frozen(), run.config.lora);
    lines.emplace_back("trained",
                       fmt::format("{} of {} parameters", with_commas(count.trained), with_commas(count.all)));
    if (run.config.lora.has_narrow_base()) {
      lines.emplace_back("base", fmt::format("frozen, stored in {}: values with more digits were rounded to it",
                                             run.config.lora.base_dtype));
    }
  }
  if (run.config.model.flavor == config::kFlavorOfDirectory) {
    const std::string file = (std::filesystem::path(run.config.model.hf_assets_path) / "config.json").string();
    const std::string line = models::hf_unsupported(read_file(file, models::kMaxHfConfigBytes), file);
    if (!line.empty()) lines.emplace_back("note", line);
  }
  if (plan.world_size > 1) lines.emplace_back("layout", run.model.layout());
  if (plan.parallel.cp > 1) {
    const plan::ContextExchangeChoice& exchange = plan.exchange;
    lines.emplace_back("exchange", exchange.reason.empty()
                                       ? exchange.name
                                       : fmt::format("{}, by a cost model: {}", exchange.name, exchange.reason));
  }
  if (const std::string balance = context_balance_text(*run.data.dataloader, plan); !balance.empty()) {
    lines.emplace_back("balance", balance);
  }
  lines.emplace_back("memory", run.model.memory_text());
  for (const std::string& text : experts_in_words(run.config, plan, model)) lines.emplace_back("experts", text);
  const bool has_tf32 = !run.device.is_cpu() && run.config.training.float32_matmul_precision == "high";
  lines.emplace_back("precision",
                     precision_text(run.config, plan) + (has_tf32 ? ", products of float32 matrices in TF32" : ""));
  if (const std::string float8 = float8_text(run.model.model(), run.config, run.device); !float8.empty()) {
    lines.emplace_back("float8", float8);
  }
  for (const auto& line : run.data.dataloader->in_words()) lines.push_back(line);
  lines.emplace_back(
      "batch", fmt::format("{} sequences x {} tokens x {} {}rank{} x {} accumulated = {} tokens a step",
                           plan.local_batch_size, training.seq_len, data_parallel_size,
                           data_parallel_size < plan.world_size ? "data " : "", data_parallel_size == 1 ? "" : "s",
                           plan.accumulation_steps, with_commas(plan.global_batch_size * training.seq_len)));
  const std::int64_t rows = training.steps * plan.global_batch_size;
  const std::vector<data::SetCount> counts = run.data.dataloader->counts_before(training.steps);
  std::string epochs;
  if (counts.empty()) {
    run.data.dataloader->each_file([&](const std::string&, const data::DataLoader& loader) {
      epochs = fmt::format(", {:.2f} epochs", static_cast<double>(rows) / static_cast<double>(loader.sample_count()));
    });
  }
  lines.emplace_back("steps", fmt::format("{} ({} tokens{})", training.steps,
                                          human_count(static_cast<double>(rows * training.seq_len)), epochs));
  std::int64_t all = 0;
  for (const data::SetCount& set : counts) all += set.sequences;
  for (const data::SetCount& set : counts) {
    lines.emplace_back(
        fmt::format("blend '{}'", set.name),
        fmt::format("{} sequences, {} tokens, {:.2f} % of all, {:.2f} epochs", with_commas(set.sequences),
                    human_count(static_cast<double>(set.sequences * training.seq_len)),
                    100 * static_cast<double>(set.sequences) / static_cast<double>(all), set.epochs));
  }
  if (run.data.validator) {
    const std::string sets =
        run.data.validator->set_count() > 1 ? fmt::format(" of {} data sets", run.data.validator->set_count()) : "";
    const auto& entropy = run.data.unigram_entropy;
    lines.emplace_back("validation", fmt::format("{} tokens{} every {} steps{}",
                                                 with_commas(run.data.validator->sample_count() * training.seq_len),
                                                 sets, run.config.validation.freq,
                                                 entropy ? fmt::format(", unigram entropy {:.4f}", *entropy) : ""));
  }
  lines.emplace_back("folder", run.config.job.dump_folder);
  return lines;
}

nlohmann::json run_record(const RunParts& run, const DescriptionLines& lines) {
  nlohmann::json environment = nlohmann::json::object();
  for (const auto& [name, value] : lines) environment[name] = value;
  nlohmann::json record = {
      {"description", run.config.job.description},
      {"status", "running"},
      {"steps", run.config.training.steps},
      {"parameters", run.model.model().parameter_count()},
      {"world_size", run.plan.world_size},
      {"model", fmt::format("{} {}", models::family_name(run.model.model().config().family), run.config.model.flavor)},
      {"layout", run.model.layout()},
      {"loss_unit", run.config.dpo.preferences.empty() ? report::kNatsPerToken : report::kNatsPerPair},
      {"config", config::print_config(config::with_model_numbers(run.config))},
      {"environment", environment}};
  if (run.data.unigram_entropy) record["unigram_entropy"] = *run.data.unigram_entropy;
  return record;
}

nlohmann::json checkpoint_metadata(const models::LlamaConfig& model, const config::TrainConfig& config,
                                   const nlohmann::json& identity) {
  nlohmann::json description = models::llama_metadata(model);
  description["flavor"] = config.model.flavor;
  return {{"model", description},
          {"hf_assets_path", config.model.hf_assets_path},
          {"run", config::identity_for_metadata(identity)}};
}

}  // namespace phalanx::train
