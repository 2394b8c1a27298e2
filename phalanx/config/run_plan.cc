#include "phalanx/config/run_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "phalanx/base/error.h"
#include "phalanx/config/context_parallel.h"
#include "phalanx/config/model_config.h"
#include "phalanx/models/config/llama_part.h"
#include "phalanx/models/config/lora_config.h"
#include "phalanx/models/config/model_dimensions.h"

namespace phalanx::config {
namespace {

std::string ranks_text(std::int64_t count) { return fmt::format("{} rank{}", count, count == 1 ? "" : "s"); }

std::string divisors_text(std::int64_t number) {
  std::string text;
  for (std::int64_t divisor = 1; divisor <= number; ++divisor) {
    if (number % divisor == 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", divisor);
  }
  return text;
}

void check_divides(std::string_view key, std::int64_t degree, std::int64_t ranks, std::string_view which) {
  if (ranks % degree == 0) return;
  throw ConfigError(fmt::format("[parallelism] {} {} does not divide the {}{}; degrees that do: {}", key, degree,
                                ranks_text(ranks), which, divisors_text(ranks)));
}

/// -1 means the ranks that the other degrees leave; if both are -1 all of them shard. tp, cp and pp divide the ranks.
ParallelPlan degrees_of(const TrainConfig& config, std::int64_t world_size) {
  const auto& given = config.parallelism;
  ParallelPlan plan{.pp = given.pipeline_parallel_degree,
                    .dp_replicate = given.data_parallel_replicate_degree,
                    .dp_shard = given.data_parallel_shard_degree,
                    .cp = given.context_parallel_degree,
                    .tp = given.tensor_parallel_degree,
                    .shards_over_cp = given.context_parallel_degree > 1 && given.data_parallel_shard_degree == -1,
                    .zero_stage = static_cast<int>(given.zero_stage),
                    .sequence_parallel = given.enable_sequence_parallel,
                    .ep = given.expert_parallel_degree};
  const std::int64_t left = world_size / plan.tp / plan.cp / plan.pp;
  if (plan.dp_shard == -1) plan.dp_shard = left / std::max<std::int64_t>(1, plan.dp_replicate);
  if (plan.dp_replicate == -1) plan.dp_replicate = left / std::max<std::int64_t>(1, plan.dp_shard);
  if (plan.dp_replicate * plan.dp_shard != left || plan.dp_shard < 1) {
    std::string cut;
    if (plan.tp > 1) cut += fmt::format(" / tensor_parallel_degree {}", plan.tp);
    if (plan.cp > 1) cut += fmt::format(" / context_parallel_degree {}", plan.cp);
    if (plan.pp > 1) cut += fmt::format(" / pipeline_parallel_degree {}", plan.pp);
    if (!cut.empty()) cut += fmt::format(" = {}", left);
    throw ConfigError(
        fmt::format("[parallelism] data_parallel_replicate_degree {} x data_parallel_shard_degree {} do not make {}{}: "
                    "their product must be the number of ranks{}; -1 for one of them takes what the other leaves",
                    given.data_parallel_replicate_degree, given.data_parallel_shard_degree, ranks_text(world_size), cut,
                    cut.empty() ? "" : " that the other degrees leave"));
  }
  return plan;
}

void check_batch(std::int64_t global, std::int64_t local, std::int64_t ranks) {
  const std::int64_t unit = local * ranks;
  if (global % unit == 0) return;
  std::string choices = fmt::format("global_batch_size {}", std::max<std::int64_t>(1, global / unit) * unit);
  if (global > unit) choices += fmt::format(" or {}", (global / unit + 1) * unit);
  if (global % ranks == 0) {
    // The largest local batch below the given one that divides a rank's share.
    std::int64_t fitting = std::min(local, global / ranks);
    while ((global / ranks) % fitting != 0) --fitting;
    choices += fmt::format(", or local_batch_size {}", fitting);
  }
  throw ConfigError(fmt::format(
      "[training] global_batch_size {} is not a multiple of local_batch_size {} x {} ranks = {}: nearest valid: {}",
      global, local, ranks, unit, choices));
}

/// What a file of another format, or an adapter, has no place for.
void check_expert_bias(const TrainConfig& config, const models::LlamaConfig& model) {
  const auto& training = config.training;
  if (!training.moe_router_enable_expert_bias) {
    if (training.moe_router_bias_update_rate == TrainConfig::Training().moe_router_bias_update_rate) return;
    throw ConfigError(
        fmt::format("[training] moe_router_bias_update_rate = {} is of a bias that experts do not have: set "
                    "moe_router_enable_expert_bias = true, or remove it",
                    training.moe_router_bias_update_rate));
  }
  const auto refuse = [](const char* what, const char* why) {
    throw ConfigError(fmt::format("[training] moe_router_enable_expert_bias does not go with {}: {}", what, why));
  };
  if (config.checkpoint.last_save_in_hf && !model.has_expert_biases()) {
    refuse("[checkpoint] last_save_in_hf",
           "Hugging Face's files of this model have no place for the biases; remove one of them");
  }
  if (config.lora.rank > 0) {
    refuse("[lora] rank", "an adapter has no place for the biases; remove one of them");
  }
}

void check_router_keys(const TrainConfig& config, const models::LlamaConfig& model, const ParallelPlan& plan) {
  const auto& training = config.training;
  std::vector<std::string> given;
  const double weight = training.moe_aux_loss_coeff;
  if (weight != 0) given.push_back(fmt::format("moe_aux_loss_coeff = {}", weight));
  if (training.moe_z_loss_coeff != 0) given.push_back(fmt::format("moe_z_loss_coeff = {}", training.moe_z_loss_coeff));
  if (training.moe_router_enable_expert_bias) given.emplace_back("moe_router_enable_expert_bias");
  if (const double eps = training.moe_input_jitter_eps; eps != 0) {
    given.push_back(fmt::format("moe_input_jitter_eps = {}", eps));
  }
  if (const double factor = training.moe_expert_capacity_factor; factor != 0) {
    given.push_back(fmt::format("moe_expert_capacity_factor = {}", factor));
  }
  if (!given.empty() && !model.has_experts()) {
    throw ConfigError(
        fmt::format("[training] {} is for the experts of a mixture, and the model has none: remove it", given[0]));
  }
  if (weight == 0 && training.moe_aux_loss_unit != TrainConfig::Training().moe_aux_loss_unit) {
    throw ConfigError(fmt::format(
        "[training] moe_aux_loss_unit = \"{}\" is of a loss that has no weight: set moe_aux_loss_coeff, or remove it",
        training.moe_aux_loss_unit));
  }
  if (training.moe_expert_capacity_factor != 0 && training.attn_mask_type == "block_causal") {
    throw ConfigError(fmt::format(
        "[training] moe_expert_capacity_factor = {} counts the tokens of a sequence, and with attn_mask_type = "
        "\"block_causal\" (as [sft] and [dpo] set it) that holds several documents, which would take each other's "
        "places: expected 0 beside it",
        training.moe_expert_capacity_factor));
  }
  check_expert_bias(config, model);
  if (plan.cp == 1 || given.empty()) return;
  const ContextCut cut = plan.context_cut(0);
  if (cut.padded(training.seq_len) == training.seq_len) return;
  throw ConfigError(
      fmt::format("[training] {} counts the tokens of routers, and context_parallel_degree = {} pads sequences of {} "
                  "to {}: expected a seq_len that is a multiple of {}",
                  given[0], plan.cp, training.seq_len, cut.padded(training.seq_len), plan.cp * cut.multiple));
}

/// The whole share of a data-parallel rank goes through the pipeline in one step: micro-batches are accumulated.
void plan_pipeline(const TrainConfig& config, const models::LlamaConfig& model, RunPlan& plan) {
  const std::int64_t share = plan.local_batch_size * plan.accumulation_steps;
  const std::int64_t size = config.parallelism.pipeline_parallel_microbatch_size;
  if (share % size != 0) {
    throw ConfigError(
        fmt::format("[parallelism] pipeline_parallel_microbatch_size {} does not divide the {} sequences of "
                    "a data rank; sizes that do: {}",
                    size, share, divisors_text(share)));
  }
  plan.local_batch_size = share;
  plan.accumulation_steps = 1;
  plan.micro_batches = share / size;
  const auto schedule = schedule::make_schedule(schedule_options(config, plan));
  models::balance_llama(model, schedule.stages(), config.training.seq_len);  // refuses a model with too few layers
}

}  // namespace

bool counts_load_over_data_ranks(const TrainConfig& config) {
  return config.training.moe_aux_loss_coeff != 0 && config.training.moe_aux_loss_unit == "global_batch";
}

void require_equivalent_on_one_rank(const TrainConfig& config, const RunPlan& plan) {
  const std::int64_t data_ranks = plan.parallel.data_parallel_size();
  const std::int64_t passes = plan.accumulation_steps * plan.micro_batches;
  if (!counts_load_over_data_ranks(config) || data_ranks == 1 || passes == 1) return;
  throw ConfigError(fmt::format(
      "[training] moe_aux_loss_unit = \"global_batch\" counts the tokens of {} data ranks together in each of their {} "
      "forward passes of a step, and one rank never has the sequences of such a pass at once: expected one pass, with "
      "local_batch_size = {} and one micro-batch in a pipeline, or another unit",
      data_ranks, passes, plan.global_batch_size / data_ranks));
}

std::optional<RunPlan> collect_plan(const TrainConfig& config, std::int64_t world_size,
                                    const std::set<std::string>& wrong_keys, ConfigProblems& problems) {
  const auto is_right = [&](std::initializer_list<const char*> keys) {
    return std::ranges::none_of(keys, [&](const char* key) { return wrong_keys.contains(key); });
  };
  // Values that could not be read, or that depend on wrong ones, are not checked.
  const auto holds = [&](bool can_judge, auto&& check) { return can_judge && !problems.collect(check); };

  const bool model_is_read = std::ranges::none_of(
      wrong_keys, [](const std::string& key) { return key.starts_with("model.") || key == "training.seq_len"; });
  models::LlamaConfig model;
  const bool model_is_right = holds(model_is_read, [&] { model = model_config(config); });

  const auto& given = config.parallelism;
  const std::int64_t tp = given.tensor_parallel_degree, cp = given.context_parallel_degree,
                     pp = given.pipeline_parallel_degree;
  const bool tp_divides = holds(is_right({"parallelism.tensor_parallel_degree"}),
                                [&] { check_divides("tensor_parallel_degree", tp, world_size, ""); });
  const bool tp_leaves = tp_divides && tp > 1;
  const std::int64_t beside_tp = tp_leaves ? world_size / tp : world_size;
  const bool cp_divides = holds(is_right({"parallelism.context_parallel_degree"}), [&] {
    check_divides("context_parallel_degree", cp, beside_tp, tp_leaves ? " that tensor parallelism leaves" : "");
  });
  const bool pp_divides = holds(is_right({"parallelism.pipeline_parallel_degree"}), [&] {
    const bool cp_leaves = cp_divides && cp > 1;
    const std::string_view which = tp_leaves && cp_leaves ? " that tensor and context parallelism leave"
                                   : cp_leaves            ? " that context parallelism leaves"
                                   : tp_leaves            ? " that tensor parallelism leaves"
                                                          : "";
    check_divides("pipeline_parallel_degree", pp, cp_leaves ? beside_tp / cp : beside_tp, which);
  });
  ParallelPlan parallel;
  const bool dp_is_read = is_right({"parallelism.data_parallel_replicate_degree",
                                    "parallelism.data_parallel_shard_degree", "parallelism.zero_stage"}) &&
                          given.data_parallel_replicate_degree != 0 && given.data_parallel_shard_degree != 0;
  const bool degrees_are_right =
      holds(tp_divides && cp_divides && pp_divides && dp_is_read, [&] { parallel = degrees_of(config, world_size); });
  // It must be a known schedule even without a pipeline.
  const bool has_schedule = holds(true, [&] {
    try {
      schedule::schedule_name(given.pipeline_parallel_schedule);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("[parallelism] pipeline_parallel_schedule: {}", error.what()));
    }
  });
  const bool fits = holds(model_is_right && degrees_are_right, [&] {
    check(parallel, models::model_dimensions(model, parallel.tp, config.training.seq_len), world_size,
          {.tp = "[parallelism] tensor_parallel_degree",
           .pp = "[parallelism] pipeline_parallel_degree",
           .ep = "[parallelism] expert_parallel_degree",
           .cp = "[parallelism] context_parallel_degree",
           .sequence_parallel = "enable_sequence_parallel"});
  });
  holds(model_is_right && degrees_are_right, [&] { check_context_parallel(config, model, parallel); });
  holds(model_is_right && degrees_are_right, [&] { models::check_nf4_cuts(model, config.lora, parallel.tp); });
  holds(model_is_right && degrees_are_right, [&] { check_router_keys(config, model, parallel); });
  holds(degrees_are_right, [&] {
    if (parallel.is_sharded() || !config.training.enable_cpu_offload) return;
    throw ConfigError(fmt::format(
        "[training] enable_cpu_offload is for sharded training, but of {} none shares the model with another: "
        "start more, or remove it",
        ranks_text(world_size)));
  });
  holds(degrees_are_right, [&] {
    const std::int64_t group = reshard_group(config);
    if (group == 0 || parallel.shards() % group == 0) return;
    throw ConfigError(fmt::format(
        "[parallelism] fsdp_reshard_after_forward = {} does not divide the {} ranks among which the model is sharded",
        group, parallel.shards()));
  });
  // Without valid degrees: as for one data-parallel rank; the batches of more ranks are multiples of its batch.
  const std::int64_t data_parallel_size = degrees_are_right ? parallel.data_parallel_size() : 1;
  const std::int64_t local = config.training.local_batch_size;
  const std::int64_t unit = local * data_parallel_size;
  const std::int64_t global = config.training.global_batch_size == -1 ? unit : config.training.global_batch_size;
  const bool batches_are_right =
      holds(global != 0 && is_right({"training.local_batch_size", "training.global_batch_size",
                                     "training.num_tokens_per_microbatch_per_dp_rank",
                                     "training.num_tokens_per_train_step", "training.seq_len"}),
            [&] { check_batch(global, local, data_parallel_size); });
  if (!degrees_are_right || !batches_are_right) return std::nullopt;
  RunPlan plan{.world_size = world_size,
               .parallel = parallel,
               .local_batch_size = local,
               .accumulation_steps = global / unit,
               .global_batch_size = global};
  if (parallel.pp > 1 && !holds(fits && has_schedule &&
                                    is_right({"parallelism.pipeline_parallel_microbatch_size",
                                              "parallelism.pipeline_parallel_stages_per_rank"}),
                                [&] { plan_pipeline(config, model, plan); })) {
    return std::nullopt;
  }
  if (!fits || !has_schedule) return std::nullopt;
  plan.exchange = context_exchange(config, model, parallel);
  plan.cuts_by_work = cuts_by_work(config, parallel, plan.exchange);
  plan.window = plan::window_of_all_layers(model);
  return plan;
}

RunPlan plan_run(const TrainConfig& config, std::int64_t world_size) {
  ConfigProblems problems;
  const auto plan = collect_plan(config, world_size, {}, problems);
  problems.throw_first();
  return plan.value();
}

schedule::ScheduleOptions schedule_options(const TrainConfig& config, const RunPlan& plan) {
  return {.name = config.parallelism.pipeline_parallel_schedule,
          .ranks = static_cast<int>(plan.parallel.pp),
          .stages_per_rank = static_cast<int>(config.parallelism.pipeline_parallel_stages_per_rank),
          .micro_batches = static_cast<int>(plan.micro_batches)};
}

}  // namespace phalanx::config
