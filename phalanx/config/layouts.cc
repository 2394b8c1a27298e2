#include "phalanx/config/layouts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <string_view>

#include "phalanx/base/dtype_names.h"
#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/config/model_config.h"

namespace phalanx::config {
namespace {

constexpr const char* kOneRank = "one rank";

using Parts = std::map<std::string, std::string>;

Parts split_layout(const std::string& name) {
  static const std::vector<std::string> kKnown = {"pp",       "schedule", "dp_replicate", "dp_shard", "cp",
                                                  "exchange", "balance",  "ep",           "tp",       "zero",
                                                  "sp",       "ac",       "reshard",      "batch",    "precision"};
  Parts parts;
  std::string_view rest = name;
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    const std::size_t equals = one.find('=');
    const std::string key(one.substr(0, equals));
    if (equals == std::string_view::npos || std::ranges::find(kKnown, key) == kKnown.end()) {
      throw ConfigError(fmt::format("layout '{}': '{}' is not known{}: expected parts like tp=2, of {}", name, one,
                                    did_you_mean(key, kKnown), fmt::join(kKnown, ", ")));
    }
    if (!parts.emplace(key, one.substr(equals + 1)).second) {
      throw ConfigError(fmt::format("layout '{}': {} is there twice", name, key));
    }
  }
  return parts;
}

std::int64_t number_of(const Parts& parts, const std::string& key, std::int64_t otherwise, const std::string& name) {
  const auto found = parts.find(key);
  if (found == parts.end()) return otherwise;
  std::int64_t value = 0;
  const char* const end = found->second.data() + found->second.size();
  const auto [stopped, error] = std::from_chars(found->second.data(), end, value);
  if (error != std::errc() || stopped != end || value < 1) {
    throw ConfigError(fmt::format("layout '{}': {} is '{}': expected a number, 1 or more", name, key, found->second));
  }
  return value;
}

std::string choice_of(const Parts& parts, const std::string& key, const std::vector<std::string>& choices,
                      const std::string& name) {
  const auto found = parts.find(key);
  if (found == parts.end()) return choices[0];
  std::string value = canonical_dtype(found->second);  // bf16 for bfloat16, ...
  if (std::ranges::find(choices, value) == choices.end()) {
    throw ConfigError(
        fmt::format("layout '{}': {} is '{}': expected one of {}", name, key, found->second, fmt::join(choices, ", ")));
  }
  return value;
}

/// none, full, op, or a number N: one of N blocks is recomputed.
TrainConfig::ActivationCheckpoint recomputation_of(const Parts& parts, const std::string& name) {
  TrainConfig::ActivationCheckpoint result;
  const auto found = parts.find("ac");
  const std::string how = found == parts.end() ? "none" : found->second;
  const bool is_number = !how.empty() && how.find_first_not_of("0123456789") == std::string::npos;
  if (is_number) {
    result.mode = "selective";
    result.selective_ac_option = std::to_string(number_of(parts, "ac", 1, name));
  } else if (how == "op") {
    result.mode = "selective";
    result.selective_ac_option = "op";
  } else if (how == "none" || how == "full") {
    result.mode = how;
  } else {
    throw ConfigError(fmt::format(
        "layout '{}': ac is '{}': expected one of none, full, op, or a number: of so many blocks one is computed again",
        name, how));
  }
  return result;
}

/// The batch is the same for all layouts, in forward passes that this layout can run.
void share_out_batch(TrainConfig& config, std::int64_t data_parallel_size, std::int64_t ranks) {
  auto& training = config.training;
  if (training.global_batch_size == -1) training.global_batch_size = training.local_batch_size * ranks;
  if (training.global_batch_size % data_parallel_size != 0) return;  // plan_run() refuses it, with the nearest choices
  const std::int64_t share = training.global_batch_size / data_parallel_size;
  training.local_batch_size = std::min(training.local_batch_size, share);
  while (share % training.local_batch_size != 0) --training.local_batch_size;
}

}  // namespace

NamedLayout with_layout(const TrainConfig& config, const std::string& name, std::int64_t ranks) {
  const Parts parts = split_layout(name);
  NamedLayout layout{.name = name.empty() ? kOneRank : name, .config = config};
  auto& parallelism = layout.config.parallelism;
  const std::string reduces = parallelism.fsdp_reduce_each_microbatch;
  parallelism = {.enable_async_tensor_parallel = parallelism.enable_async_tensor_parallel};
  parallelism.data_parallel_replicate_degree = number_of(parts, "dp_replicate", 1, name);
  parallelism.data_parallel_shard_degree = number_of(parts, "dp_shard", 1, name);
  parallelism.expert_parallel_degree = number_of(parts, "ep", 1, name);
  parallelism.context_parallel_degree = number_of(parts, "cp", 1, name);
  parallelism.context_parallel_exchange = choice_of(parts, "exchange", {"keys", "heads", "ring", "auto"}, name);
  parallelism.context_parallel_load_balancer = choice_of(parts, "balance", {"auto", "headtail", "ptrr"}, name);
  parallelism.tensor_parallel_degree = number_of(parts, "tp", 1, name);
  parallelism.pipeline_parallel_degree = number_of(parts, "pp", 1, name);
  if (const auto schedule = parts.find("schedule"); schedule != parts.end()) {
    parallelism.pipeline_parallel_schedule = schedule->second;
  }
  parallelism.zero_stage = number_of(parts, "zero", 3, name);
  if (parallelism.zero_stage > 3) {
    throw ConfigError(fmt::format("layout '{}': zero is {}: expected 1, 2 or 3", name, parallelism.zero_stage));
  }
  const std::int64_t data_parallel_size =
      parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree;
  // The ranks of context parallelism alone share the model if a stage is named.
  const bool shards_over_cp = parallelism.context_parallel_degree > 1 && parts.contains("zero");
  if (shards_over_cp && parallelism.data_parallel_shard_degree == 1) parallelism.data_parallel_shard_degree = -1;
  const bool can_reduce = parallelism.data_parallel_shard_degree != 1 && parallelism.zero_stage > 1 &&
                          parallelism.pipeline_parallel_degree == 1;
  if (can_reduce) parallelism.fsdp_reduce_each_microbatch = reduces;
  parallelism.enable_sequence_parallel = choice_of(parts, "sp", {"on", "off"}, name) == "on";
  parallelism.fsdp_reshard_after_forward = choice_of(parts, "reshard", {"default", "always", "never"}, name);
  layout.config.activation_checkpoint = recomputation_of(parts, name);
  if (parts.contains("precision")) {
    layout.config.training.mixed_precision_param =
        choice_of(parts, "precision", {"float32", "bfloat16", "float16"}, name);
  }
  layout.ranks = data_parallel_size * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree *
                 parallelism.pipeline_parallel_degree;
  if (layout.ranks > ranks) {
    throw ConfigError(fmt::format("layout '{}' takes {} ranks, but there are {}: give more, or smaller degrees", name,
                                  layout.ranks, ranks));
  }
  if (parts.contains("batch")) {
    // All forward passes of the layout have this many; the step stays as large as for the other layouts.
    auto& training = layout.config.training;
    if (training.global_batch_size == -1) training.global_batch_size = training.local_batch_size * ranks;
    training.local_batch_size = number_of(parts, "batch", 1, name);
    if (parallelism.pipeline_parallel_degree > 1) {
      parallelism.pipeline_parallel_microbatch_size = training.local_batch_size;
    }
  } else {
    share_out_batch(layout.config, data_parallel_size, ranks);
  }
  plan_run(layout.config, layout.ranks);
  return layout;
}

namespace {

struct Degrees {
  std::int64_t pp = 1, replicas = 1, shards = 1, cp = 1, tp = 1;
  std::int64_t ranks() const { return pp * replicas * shards * cp * tp; }
  std::int64_t largest() const { return std::max({pp, replicas, shards, cp, tp}); }
};

/// Of all powers of two whose product is at most `ranks`, in the order of the mesh's axes from the inside out.
std::vector<Degrees> mixes_of(std::int64_t ranks) {
  std::vector<Degrees> all = {Degrees{}};
  for (const auto degree : {&Degrees::tp, &Degrees::cp, &Degrees::shards, &Degrees::replicas, &Degrees::pp}) {
    std::vector<Degrees> longer;
    for (Degrees one : all) {
      for (one.*degree = 1; one.ranks() <= ranks; one.*degree *= 2) longer.push_back(one);
    }
    all = std::move(longer);
  }
  return all;
}

}  // namespace

std::vector<NamedLayout> all_layouts(const TrainConfig& config, std::int64_t ranks,
                                     std::vector<LeftOutLayout>* left_out) {
  std::vector<NamedLayout> layouts;
  const bool has_experts = model_config(config).has_experts();
  const auto add = [&](const Degrees& degrees, const std::string& more) {
    std::vector<std::string> parts;
    const auto part = [&](const char* name, std::int64_t degree) {
      if (degree > 1) parts.push_back(fmt::format("{}={}", name, degree));
    };
    part("pp", degrees.pp);
    part("dp_replicate", degrees.replicas);
    part("dp_shard", degrees.shards);
    part("cp", degrees.cp);
    part("tp", degrees.tp);
    if (!more.empty()) parts.push_back(more);
    const std::string name = fmt::format("{}", fmt::join(parts, ","));
    try {
      NamedLayout layout = with_layout(config, name, ranks);
      require_equivalent_on_one_rank(layout.config, plan_run(layout.config, layout.ranks));
      layouts.push_back(std::move(layout));
    } catch (const ConfigError& error) {
      if (left_out != nullptr) left_out->push_back({name.empty() ? kOneRank : name, error.what()});
    }
  };
  // Recomputation and 16 bits: every combination on one rank, and some with every mix of degrees of 1 and 2.
  const auto add_with_variants = [&](const Degrees& degrees, const std::string& more) {
    add(degrees, more);
    if (degrees.largest() > 2) return;
    const std::vector<std::string> variants =
        degrees.ranks() == 1 ? std::vector<std::string>{"ac=full",
                                                        "ac=2",
                                                        "ac=op",
                                                        "precision=bfloat16",
                                                        "precision=bfloat16,ac=full",
                                                        "precision=bfloat16,ac=2",
                                                        "precision=bfloat16,ac=op",
                                                        "precision=float16",
                                                        "precision=float16,ac=full",
                                                        "precision=float16,ac=2",
                                                        "precision=float16,ac=op"}
                             : std::vector<std::string>{"precision=bfloat16,ac=full", "precision=float16,ac=op"};
    const std::string before = more.empty() ? "" : more + ",";
    for (const std::string& one : variants) add(degrees, before + one);
  };
  for (const Degrees& degrees : mixes_of(ranks)) {
    if (degrees.shards == 1) add_with_variants(degrees, "");
    for (int stage = 1; degrees.shards > 1 && stage <= 3; ++stage) {
      add_with_variants(degrees, fmt::format("zero={}", stage));
    }
    if (degrees.shards > 1 && degrees.pp > 1) add(degrees, "zero=3,reshard=always");
    // Two degrees of expert parallelism where there are: unequal ones tell groups apart.
    const std::int64_t shards = degrees.shards * degrees.cp;
    for (std::int64_t ep = shards; has_experts && ep > 1 && ep >= shards / 2; ep /= 2) {
      for (int stage = 1; stage <= 3; ++stage) add_with_variants(degrees, fmt::format("zero={},ep={}", stage, ep));
    }
    if (degrees.cp == 1) continue;
    // A ring or heads in place of keys, and a model that the ranks of context parallelism share, each where little else
    // is cut.
    if (degrees.pp * degrees.replicas * degrees.shards == 1) {
      add_with_variants(degrees, "exchange=heads");
      add_with_variants(degrees, "exchange=ring");
      if (config.training.attn_mask_type == "block_causal") add(degrees, "balance=headtail");
    }
    if (degrees.pp * degrees.shards * degrees.tp == 1) add_with_variants(degrees, "zero=3");
    if (degrees.replicas == 1 && degrees.pp * degrees.shards > 1) {
      add(degrees, degrees.shards > 1 ? "zero=3,exchange=ring" : "exchange=ring");
    }
  }
  std::ranges::stable_sort(layouts, {}, &NamedLayout::ranks);
  return layouts;
}

}  // namespace phalanx::config
