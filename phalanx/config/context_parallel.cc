#include "phalanx/config/context_parallel.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/config/config_checks.h"
#include "phalanx/layout/context_cut.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx::config {
namespace {

/// Heads are dealt out over the ranks, after those of tensor parallelism have theirs.
void check_heads(const models::LlamaConfig& model, const ParallelPlan& plan) {
  const std::int64_t heads = model.n_heads / plan.tp, kv = std::max<std::int64_t>(model.n_kv_heads / plan.tp, 1);
  if (deals_out_heads(heads, kv, plan.cp)) return;
  const std::string of_tp = plan.tp > 1 ? fmt::format(" (on each of {} tensor-parallel ranks)", plan.tp) : "";
  if (heads % plan.cp != 0) {
    throw ConfigError(
        fmt::format("[parallelism] context_parallel_exchange = \"heads\" deals out heads, but context_parallel_degree "
                    "{} does not divide the {} heads{}: choose a degree that does, or context_parallel_exchange = "
                    "\"keys\"",
                    plan.cp, heads, of_tp));
  }
  throw ConfigError(
      fmt::format("[parallelism] context_parallel_exchange = \"heads\" deals out heads, but of {} key heads{} and "
                  "context_parallel_degree {} neither divides the other: choose a degree that does, or "
                  "context_parallel_exchange = \"keys\"",
                  kv, of_tp, plan.cp));
}

bool has_documents(const TrainConfig& config) { return config.training.attn_mask_type == "block_causal"; }

/// Where keys are exchanged.
bool can_cut_by_work(const TrainConfig& config) {
  // Noise of routers is that of a position, which they take from heads and tails.
  return config.parallelism.context_parallel_load_balancer != "headtail" && has_documents(config) &&
         config.training.moe_input_jitter_eps == 0;
}

void check_load_balancer(const TrainConfig& config, const std::string& exchange) {
  if (config.parallelism.context_parallel_load_balancer != "ptrr") return;
  const auto refuse = [](const std::string& what) {
    throw ConfigError(fmt::format(
        "[parallelism] context_parallel_load_balancer = \"ptrr\" {}; or set it to \"auto\" or \"headtail\"", what));
  };
  if (!has_documents(config)) {
    refuse(
        fmt::format("deals out blocks of packed sequences, but attn_mask_type is \"{}\", where heads and tails are "
                    "equal work: set it to \"block_causal\"",
                    config.training.attn_mask_type));
  }
  if (exchange != "keys" && exchange != "auto") {
    const bool by_rotation = config.parallelism.context_parallel_rotate_method == "alltoall";
    refuse(fmt::format(
        "is for an exchange of keys, but {} are exchanged: set {}{}",
        exchange == "heads" ? "heads" : "pieces round a ring",
        by_rotation ? "context_parallel_rotate_method = \"allgather\"" : "context_parallel_exchange = \"keys\"",
        exchange == "heads" ? ", though with heads all ranks have equal work" : ""));
  }
  if (config.training.moe_input_jitter_eps != 0) {
    refuse(
        fmt::format("does not go with moe_input_jitter_eps = {}, whose noise takes positions of heads and tails: set "
                    "that to 0",
                    config.training.moe_input_jitter_eps));
  }
}

}  // namespace

plan::ContextExchangeChoice context_exchange(const TrainConfig& config, const models::LlamaConfig& model,
                                             const ParallelPlan& plan) {
  const auto& given = config.parallelism;
  if (given.context_parallel_rotate_method == "alltoall") return {.name = "ring", .reason = ""};
  if (given.context_parallel_exchange != "auto") return {.name = given.context_parallel_exchange, .reason = ""};
  if (plan.cp == 1) return {.name = "keys", .reason = ""};
  if (given.context_parallel_load_balancer == "ptrr") return {.name = "keys", .reason = ""};  // of these alone
  return plan::choose_context_exchange({.model = model,
                                        .cp = plan.cp,
                                        .tp = plan.tp,
                                        .batch = config.training.local_batch_size,
                                        .seq = config.training.seq_len,
                                        .number_bytes = config.training.mixed_precision_param == "float32" ? 4 : 2,
                                        .has_documents = has_documents(config),
                                        .balances_keys = can_cut_by_work(config)});
}

bool cuts_by_work(const TrainConfig& config, const ParallelPlan& plan, const plan::ContextExchangeChoice& exchange) {
  return plan.cp > 1 && exchange.name == "keys" && can_cut_by_work(config);
}

void check_context_parallel(const TrainConfig& config, const models::LlamaConfig& model, const ParallelPlan& plan) {
  if (plan.cp == 1) return;
  const auto& given = config.parallelism;
  const bool is_ring = given.context_parallel_rotate_method == "alltoall";
  if (!is_ring && given.context_parallel_rotate_method != "allgather") {
    throw ConfigError(fmt::format(
        "[parallelism] context_parallel_rotate_method is \"{}\": expected \"allgather\" or \"alltoall\"; to "
        "exchange heads (Ulysses) set context_parallel_exchange = \"heads\"",
        given.context_parallel_rotate_method));
  }
  if (const std::string& exchange = given.context_parallel_exchange;
      is_ring && (exchange == "heads" || exchange == "auto")) {
    throw ConfigError(
        fmt::format("[parallelism] context_parallel_rotate_method = \"alltoall\" is a ring of keys and values, but "
                    "context_parallel_exchange = \"{}\" {}: remove one of the two",
                    exchange, exchange == "heads" ? "exchanges heads" : "chooses one"));
  }
  if (given.context_parallel_exchange == "heads") check_heads(model, plan);
  check_load_balancer(config, is_ring ? "ring" : given.context_parallel_exchange);
  const auto refuse = [&](const std::string& what, const std::string& remedy) {
    throw ConfigError(
        fmt::format("[parallelism] context_parallel_degree = {} does not go with {}: {}", plan.cp, what, remedy));
  };
  if (uses_float8(config)) {
    refuse("float8 layers ([model] converters)",
           "scales would be those of a part of a sequence; remove the converter, or set the degree to 1");
  }
  if (config.lora.rank > 0 && config.lora.dropout > 0) {
    refuse("[lora] dropout", "its mask is that of whole sequences; set dropout to 0, or the degree to 1");
  }
  if (plan.pp > 1 && given.pipeline_parallel_balance == "measured") {
    refuse("pipeline_parallel_balance = \"measured\"",
           "it measures layers on whole sequences; set it to \"counted\", or the degree to 1");
  }
  const ContextCut cut = plan.context_cut(0);
  const std::int64_t seq_len = config.training.seq_len;
  if (model.rope_scaling.depends_on_length() && cut.padded(seq_len) != seq_len) {
    refuse(fmt::format("seq_len {} and {} rope scaling", seq_len, models::rope_scaling_name(model.rope_scaling.type)),
           fmt::format("padding would change the angles; set seq_len to a multiple of {}", cut.ranks * cut.multiple));
  }
}

}  // namespace phalanx::config
