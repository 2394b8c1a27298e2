#include "phalanx/plan/layout_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/models/config/lora_config.h"
#include "phalanx/models/config/model_dimensions.h"
#include "phalanx/plan/bytes_text.h"
#include "phalanx/plan/scenario.h"

namespace phalanx::plan {
namespace {

std::vector<std::int64_t> divisors_of(std::int64_t number) {
  std::vector<std::int64_t> found;
  for (std::int64_t divisor = 1; divisor <= number; ++divisor) {
    if (number % divisor == 0) found.push_back(divisor);
  }
  return found;
}

int cuts_of(const ParallelPlan& plan) { return (plan.tp > 1 ? 1 : 0) + (plan.pp > 1 ? 2 : 0); }
int recomputed_of(const Layout& layout) { return layout.recompute_every == 0 ? 0 : layout.uses_op_sac ? 1 : 2; }
int stage_of(const ParallelPlan& plan) { return plan.is_sharded() ? plan.zero_stage : 0; }

auto order_of(const Candidate& candidate) {
  const Layout& layout = candidate.layout;
  return std::tuple(-candidate.devices, cuts_of(layout.parallel), recomputed_of(layout),
                    layout.parallel.tp * layout.parallel.pp, candidate.comm_volume.weighted(),
                    stage_of(layout.parallel), layout.passes, layout.parallel.dp_shard);
}

/// The least usable memory of `count` consecutive ranks from `first` on.
std::int64_t least_usable(const Devices& devices, std::int64_t first, std::int64_t count, double headroom) {
  std::int64_t bytes = devices.bytes_of(first);
  for (std::int64_t rank = 1; rank < count; ++rank) bytes = std::min(bytes, devices.bytes_of(first + rank));
  return usable(bytes, headroom);
}

Candidate evaluate_on(const Devices& devices, const SearchOptions& options, const Layout& layout) {
  const ParallelPlan& parallel = layout.parallel;
  const std::int64_t block = parallel.loss_parts() * parallel.tp;  // ranks of a stage, or all
  Candidate candidate{.layout = layout, .devices = block * parallel.pp};
  const TrainingShape shape = apply_layout(options.base, layout);
  candidate.comm_volume = predict_comm_volume(shape, layout, devices.per_node);
  if (!shape.pipeline) {
    candidate.memory = predict_memory(shape);
    candidate.available = least_usable(devices, 0, block, options.headroom);
    return candidate;
  }
  std::optional<std::int64_t> least;
  for (std::int64_t stage = 0; stage < parallel.pp; ++stage) {
    TrainingMemory memory = predict_memory_of_stage_rank(shape, static_cast<std::size_t>(stage));
    const std::int64_t available = least_usable(devices, stage * block, block, options.headroom);
    const std::int64_t spare = available - memory.total();
    if (least && spare >= *least) continue;
    least = spare;
    candidate.memory = std::move(memory);
    candidate.available = available;
  }
  return candidate;
}

class Search {
 public:
  Search(const SearchOptions& options, const Devices& devices) : options_(options), devices_(devices) {}

  void run(std::vector<Candidate>& found) {
    const std::int64_t count = devices_.count();
    for (const std::int64_t tp : divisors_of(count)) {
      if (devices_.per_node % tp != 0) continue;
      for (const std::int64_t pp : divisors_of(count / tp)) {
        const std::int64_t data = count / tp / pp;
        if (options_.global_batch % data != 0) continue;
        for (const std::int64_t shards : divisors_of(data)) {
          for (const std::int64_t ep : divisors_of(options_.base.model.has_experts() ? shards : 1)) {
            add_stages({.pp = pp, .dp_replicate = data / shards, .dp_shard = shards, .tp = tp, .ep = ep}, found);
          }
        }
      }
    }
  }

 private:
  bool is_valid(const ParallelPlan& plan) const {
    try {
      check(plan, models::model_dimensions(options_.base.model, plan.tp, options_.base.seq), devices_.count());
      models::check_nf4_cuts(options_.base.model, options_.base.lora, plan.tp);
      return true;
    } catch (const ConfigError&) {
      return false;  // a layout that does not divide the model is left out
    }
  }

  void add_stages(ParallelPlan plan, std::vector<Candidate>& found) const {
    const bool needs_sharding = options_.base.offload || options_.base.reduce_bytes < kFloatBytes;
    if (plan.dp_shard == 1 && needs_sharding) return;
    if (!is_valid(plan)) return;
    for (int stage = plan.dp_shard > 1 ? 1 : 3; stage <= 3; ++stage) {
      // Stages of a pipeline have full gradients throughout a step: stage 2 needs no less there than stage 1.
      if (plan.pp > 1 && plan.dp_shard > 1 && stage == 2) continue;
      plan.zero_stage = stage;
      for (int recompute = 0; recompute <= 2; ++recompute) {
        Layout layout{.parallel = plan, .schedule = options_.schedule};
        layout.recompute_every = recompute > 0 ? 1 : 0;
        layout.uses_op_sac = recompute == 1;
        if (auto candidate = largest_batch(layout)) found.push_back(*std::move(candidate));
      }
    }
  }

  std::optional<Candidate> largest_batch(Layout layout) const {
    const std::int64_t share = options_.global_batch / layout.parallel.data_parallel_size();
    std::vector<std::int64_t> batches = divisors_of(share);
    std::optional<Candidate> last;
    for (auto batch = batches.rbegin(); batch != batches.rend(); ++batch) {
      if (*batch > options_.max_batch) continue;
      layout.batch = *batch;
      layout.passes = share / *batch;
      try {
        last = evaluate_on(devices_, options_, layout);
      } catch (const ConfigError&) {
        continue;  // too few micro-batches for the schedule, or too few layers for its stages
      }
      if (last->fits()) break;
    }
    return last;
  }

  const SearchOptions& options_;
  const Devices& devices_;
};

}  // namespace

Candidate evaluate(const SearchOptions& options, const Layout& layout) {
  return evaluate_on(options.devices, options, layout);
}

std::vector<Candidate> best_first(std::vector<Candidate> candidates) {
  std::ranges::stable_sort(candidates, {}, order_of);
  return candidates;
}

std::vector<Candidate> search_layouts(const SearchOptions& options) {
  std::vector<Candidate> found;
  Search(options, options.devices).run(found);
  if (!options.devices.are_alike()) {
    const Devices largest = options.devices.largest_ones();
    Search(options, largest).run(found);
  }
  if (found.empty()) {
    throw ConfigError(fmt::format(
        "{} sequences a step cannot be shared out over {} devices: no layout's data ranks divide them, or its "
        "degrees do not divide the model; nearest that does: {}",
        options.global_batch, options.devices.count(),
        (options.global_batch / options.devices.count() + 1) * options.devices.count()));
  }
  return best_first(std::move(found));
}

ActivationChoices activation_choices(const TrainingShape& base, Layout layout) {
  const auto activations = [&](std::int64_t every, bool uses_op_sac) {
    layout.recompute_every = every;
    layout.uses_op_sac = uses_op_sac;
    return predict_memory(apply_layout(base, layout)).peak[observe::MemoryCategory::activations];
  };
  return {.none = activations(0, false), .op = activations(1, true), .full = activations(1, false)};
}

const Candidate* recommended(const std::vector<Candidate>& candidates) {
  const auto found = std::ranges::find_if(candidates, &Candidate::fits);
  return found == candidates.end() ? nullptr : &*found;
}

std::vector<std::string> reasons(const std::vector<Candidate>& candidates, const Candidate& chosen) {
  std::vector<std::pair<std::string, const Candidate*>> kinds;
  const auto missing = [](const Candidate& one) { return one.memory.total() - one.available; };
  for (const Candidate& candidate : candidates) {
    if (&candidate == &chosen) break;
    const std::string kind = kind_of(candidate.layout.parallel);
    const auto known = std::ranges::find(kinds, kind, &std::pair<std::string, const Candidate*>::first);
    if (known == kinds.end()) {
      kinds.emplace_back(kind, &candidate);
    } else if (missing(candidate) < missing(*known->second)) {
      known->second = &candidate;
    }
  }
  std::vector<std::string> lines;
  for (const auto& [kind, nearest] : kinds) {
    lines.push_back(fmt::format("{}: {} needs {} a device, {} more than there are", kind, name_of(nearest->layout),
                                bytes_text(nearest->memory.total()), bytes_text(missing(*nearest))));
  }
  return lines;
}

}  // namespace phalanx::plan
