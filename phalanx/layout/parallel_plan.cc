#include "phalanx/layout/parallel_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

struct Rule {
  std::string text;  // the violated rule: "n_heads 6 / tp 4"
  bool holds = true;
};

/// The rules of tensor parallelism over `tp` ranks for a model.
std::vector<Rule> rules_of_tp(std::int64_t tp, const ModelDimensions& model, bool sequence_parallel) {
  const auto divides = [&](const char* name, std::int64_t number) {
    return Rule{fmt::format("{} {} / {} leaves {}", name, number, tp, number % tp), number % tp == 0};
  };
  std::vector<Rule> rules = {divides("n_heads", model.n_heads), divides("ffn_hidden", model.ffn_hidden),
                             divides("vocab_size", model.vocab_size)};
  const std::int64_t kv = model.n_kv_heads;
  rules.push_back({fmt::format("of n_kv_heads {} and {} neither divides the other", kv, tp),
                   kv % tp == 0 || (kv > 0 && tp % kv == 0)});
  if (model.dense_hidden != 0) rules.push_back(divides("dense_hidden", model.dense_hidden));
  if (sequence_parallel) rules.push_back(divides("seq_len", model.seq_len));
  return rules;
}

bool tp_fits(std::int64_t tp, const ModelDimensions& model, bool sequence_parallel) {
  return std::ranges::all_of(rules_of_tp(tp, model, sequence_parallel), &Rule::holds);
}

void check_tp(const ParallelPlan& plan, const ModelDimensions& model, const PlanNames& names) {
  std::vector<std::string> broken;
  for (const Rule& rule : rules_of_tp(plan.tp, model, plan.sequence_parallel)) {
    if (!rule.holds) broken.push_back(rule.text);
  }
  if (broken.empty()) return;
  std::vector<std::int64_t> fitting;
  for (std::int64_t tp = 1; tp <= std::min<std::int64_t>(model.n_heads, 1024); ++tp) {
    if (tp_fits(tp, model, plan.sequence_parallel)) fitting.push_back(tp);
  }
  std::string more;
  if (plan.sequence_parallel && tp_fits(plan.tp, model, false)) {
    more = fmt::format("; or switch {} off", names.sequence_parallel);
  }
  throw ConfigError(fmt::format("{} = {} does not fit the model: {}; degrees that do: {}{}", names.tp, plan.tp,
                                fmt::join(broken, ", "), fmt::join(fitting, ", "), more));
}

void check_ep(const ParallelPlan& plan, const ModelDimensions& model, const PlanNames& names) {
  if (model.experts == 0) {
    throw ConfigError(fmt::format("{} = {}, but the model has no experts: expected 1", names.ep, plan.ep));
  }
  std::vector<std::int64_t> fitting;
  for (std::int64_t ep = 1; ep <= plan.shards(); ++ep) {
    if (plan.shards() % ep == 0 && model.experts % ep == 0) fitting.push_back(ep);
  }
  if (std::ranges::find(fitting, plan.ep) != fitting.end()) return;
  throw ConfigError(
      fmt::format("{} = {} does not divide both the number of ranks that shard the model, {}, and the {} experts of a "
                  "layer; degrees "
                  "that do: {}",
                  names.ep, plan.ep, plan.shards(), model.experts, fmt::join(fitting, ", ")));
}

}  // namespace

std::vector<MeshAxis> ParallelPlan::axes() const {
  std::vector<MeshAxis> result;
  const std::pair<const char*, std::int64_t> all[] = {
      {"pp", pp}, {replica_axis(), replicas()}, {shard_axis(), shards()}, {"tp", tp}};
  for (const auto& [name, size] : all) {
    if (size > 1) result.push_back({name, static_cast<int>(size)});
  }
  if (result.empty()) result.push_back({"dp_shard", 1});
  return result;
}

std::string ParallelPlan::text() const {
  std::vector<std::string> parts;
  if (pp > 1) parts.push_back(fmt::format("pp={}", pp));
  if (dp_replicate > 1) parts.push_back(fmt::format("dp_replicate={}", dp_replicate));
  if (is_sharded()) {
    parts.push_back(fmt::format("dp_shard={} (ZeRO-{}{})", dp_shard, zero_stage, cp > 1 ? " over dp_shard x cp" : ""));
  }
  if (cp > 1) parts.push_back(fmt::format("cp={}", cp));
  if (ep > 1) parts.push_back(fmt::format("ep={}", ep));
  if (tp > 1) parts.push_back(fmt::format("tp={}{}", tp, sequence_parallel ? " (sequence parallel)" : ""));
  return parts.empty() ? "1 rank" : fmt::format("{}", fmt::join(parts, " x "));
}

void check(const ParallelPlan& plan, const ModelDimensions& model, std::int64_t ranks, const PlanNames& names) {
  for (const auto& [name, degree] : {std::pair<std::string, std::int64_t>{names.pp, plan.pp},
                                     {"dp_replicate", plan.dp_replicate},
                                     {"dp_shard", plan.dp_shard},
                                     {names.cp, plan.cp},
                                     {names.tp, plan.tp},
                                     {names.ep, plan.ep}}) {
    if (degree < 1) throw ConfigError(fmt::format("{} is {}: expected 1 or more", name, degree));
  }
  if (plan.ranks() != ranks) {
    throw ConfigError(fmt::format("pp {} x dp_replicate {} x dp_shard {} x cp {} x tp {} = {} ranks, but there are {}",
                                  plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.ranks(), ranks));
  }
  if (plan.tp > 1) check_tp(plan, model, names);
  if (plan.ep > 1) check_ep(plan, model, names);
  if (plan.pp > model.n_layers) {
    throw ConfigError(fmt::format("{} = {} stages, but the model has {} layers: expected at most as many stages",
                                  names.pp, plan.pp, model.n_layers));
  }
}

}  // namespace phalanx
