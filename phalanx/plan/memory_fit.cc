#include "phalanx/plan/memory_fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "phalanx/base/error.h"
#include "phalanx/plan/bytes_text.h"
#include "phalanx/schedule/generators.h"

namespace phalanx::plan {
namespace {

constexpr std::int64_t kHardlyMore = 1 << 20;  // of a category: not worth reporting
constexpr const char* kRecompute = "activation_checkpoint.mode = \"full\"";
constexpr const char* kReduceEach = "parallelism.fsdp_reduce_each_microbatch = \"default\"";

class Remedies {
 public:
  Remedies(const TrainingShape& shape, const std::function<bool(const TrainingMemory&)>& fits)
      : shape_(shape), present_(predict_memory(shape)), fits_(fits) {}

  std::string largest_saving() {
    std::optional<std::int64_t> least;
    std::string best;
    const std::function<bool(const TrainingMemory&)> is_less = [&](const TrainingMemory& memory) {
      if (memory.total() >= least.value_or(present_.total())) return false;
      least = memory.total();
      return true;
    };
    // Each change is tried alone; of the batches only the smallest is tried.
    const auto attempt = [&](const TrainingShape& shape, const std::string& keys) {
      Remedies one(shape_, is_less);
      if (one.add(shape, keys)) best = one.found_.front();
    };
    TrainingShape reduced = shape_;
    reduced.reduces_each_microbatch = true;
    if (!shape_.accumulates_sharded_gradients() && reduced.accumulates_sharded_gradients())
      attempt(reduced, kReduceEach);
    if (shape_.ranks() > 1) attempt(most_sharded(), keys_of_sharding(most_sharded()));
    TrainingShape recomputed = shape_;
    recomputed.recompute_every = 1;
    recomputed.uses_op_sac = false;
    attempt(recomputed, kRecompute);
    Remedies batches(shape_, is_less);
    while (batches.shrink_batch(shape_, "")) best = batches.found_.back();
    return best;
  }

  std::vector<std::string> find() {
    const bool by_reducing = reduce_each_pass();
    const bool by_sharding = shard_more();
    const bool by_dividing = divide_experts();
    const bool by_recomputing = recompute(shape_, "");
    const bool by_batch = shrink_batch(shape_, "");
    if (by_reducing || by_sharding || by_dividing || by_recomputing || by_batch) return found_;
    TrainingShape most = shape_;
    std::string keys;
    if (shape_.ranks() > 1) {
      most = most_sharded();
      keys = keys_of_sharding(most) + ", ";
    }
    if (recompute(most, keys)) return found_;
    if (shrink_batch(most, keys)) return found_;
    most.recompute_every = 1;
    shrink_batch(most, fmt::format("{}{}, ", keys, kRecompute));
    return found_;
  }

 private:
  bool add(const TrainingShape& shape, const std::string& keys) {
    const TrainingMemory memory = predict_memory(shape);
    if (!fits_(memory)) return false;
    found_.push_back(fmt::format("{} ({} a rank, {} less)", keys, bytes_text(memory.total()),
                                 bytes_text(present_.total() - memory.total())));
    return true;
  }

  TrainingShape sharded(int stage) const {
    TrainingShape shape = shape_;
    shape.shards = shape.ranks();
    shape.replicas = 1;
    shape.zero_stage = stage;
    shape.reshard_after_forward = true;
    return shape;
  }
  /// The gradients of a pipeline's stages are full under every ZeRO stage. Under stages 2 and 3 shards exist beside
  /// them at the end of a step. What stage 3 saves of the parameters may be less than these shards and the unsharded
  /// units need.
  TrainingShape most_sharded() const {
    TrainingShape first = sharded(1), third = sharded(3);
    const bool is_less = predict_memory(first).total() < predict_memory(third).total();
    return shape_.pipeline && is_less ? first : third;
  }
  std::string keys_of_sharding(const TrainingShape& shape) const {
    std::string keys = fmt::format("parallelism.zero_stage = {}", shape.zero_stage);
    if (shape_.shards != shape.shards) {
      keys = fmt::format("parallelism.data_parallel_shard_degree = {}, {}", shape.shards, keys);
    }
    const bool says_so = shape.zero_stage == 3 && !shape_.reshard_after_forward;
    return says_so ? keys + ", parallelism.fsdp_reshard_after_forward = \"always\"" : keys;
  }

  /// Tries the lowest ZeRO stage that fits: higher stages communicate more, or save less memory.
  bool shard_more() {
    if (shape_.ranks() == 1) return false;
    for (int stage = 1; stage <= 3; ++stage) {
      const TrainingShape shape = sharded(stage);
      // In a pipeline the lowest stage may need least: from stage 2 on full gradients exist beside the shards at the
      // end.
      if (shape.shards == shape_.shards && stage < shape_.zero_stage && !shape_.pipeline) continue;
      if (add(shape, keys_of_sharding(shape))) return true;
    }
    return false;
  }
  /// Tries the lowest degree that fits: with higher ones a step waits for a rank whose experts are popular.
  bool divide_experts() {
    if (!shape_.model.has_experts()) return false;
    for (std::int64_t degree = shape_.expert_parallel_size + 1; degree <= shape_.shards; ++degree) {
      if (shape_.shards % degree != 0 || shape_.model.experts % degree != 0) continue;
      TrainingShape shape = shape_;
      shape.expert_parallel_size = degree;
      if (add(shape, fmt::format("parallelism.expert_parallel_degree = {}", degree))) return true;
    }
    return false;
  }
  bool reduce_each_pass() {
    TrainingShape shape = shape_;
    shape.reduces_each_microbatch = true;
    return !shape_.accumulates_sharded_gradients() && shape.accumulates_sharded_gradients() && add(shape, kReduceEach);
  }
  bool recompute(TrainingShape shape, const std::string& keys) {
    if (shape.recompute_every == 1) return false;
    shape.recompute_every = 1;
    return add(shape, keys + kRecompute);
  }
  /// The same global batch in more parts. It stays a multiple of every divisor of the present local batch. It is
  /// written out, because else it would follow the local batch.
  bool shrink_batch(TrainingShape shape, const std::string& keys) {
    if (shape.pipeline) return shrink_micro_batch(shape, keys);
    const std::int64_t present = shape.batch;
    const std::int64_t global = shape.global_batch > 0 ? shape.global_batch : present * shape.ranks();
    shape.accumulates = true;
    for (std::int64_t batch = present / 2; batch >= 1; --batch) {
      if (present % batch != 0) continue;
      shape.batch = batch;
      if (add(shape,
              fmt::format("{}training.local_batch_size = {}, training.global_batch_size = {}", keys, batch, global))) {
        return true;
      }
    }
    return false;
  }

  /// For a pipeline: the same batch in more micro-batches, if its schedule allows them.
  bool shrink_micro_batch(TrainingShape shape, const std::string& keys) {
    const std::int64_t present = shape.batch;
    const schedule::Schedule before = shape.pipeline->schedule;
    for (std::int64_t batch = present / 2; batch >= 1; --batch) {
      if (present % batch != 0) continue;
      try {
        shape.pipeline->schedule =
            schedule::make_schedule({.name = before.name,
                                     .ranks = before.ranks(),
                                     .stages_per_rank = before.stages() / before.ranks(),
                                     .micro_batches = before.micro_batches * static_cast<int>(present / batch)});
      } catch (const ConfigError&) {
        continue;
      }
      shape.batch = batch;
      if (add(shape, fmt::format("{}parallelism.pipeline_parallel_microbatch_size = {}", keys, batch))) return true;
    }
    return false;
  }

  const TrainingShape& shape_;
  const TrainingMemory present_;
  const std::function<bool(const TrainingMemory&)>& fits_;
  std::vector<std::string> found_;
};

}  // namespace

std::int64_t counted_by(const MemoryLimit& limit, const TrainingMemory& memory) {
  switch (limit.counts) {
    case MemoryLimit::Counts::private_memory:
      return memory.total() + memory.thread_stacks - memory.peak.shared;
    case MemoryLimit::Counts::mappings:
      return memory.total() + memory.thread_stacks + memory.mapped;
    case MemoryLimit::Counts::everything:
      break;
  }
  return memory.total();
}

std::optional<MemoryShortage> find_shortage(const TrainingMemory& memory, const std::vector<LimitOfRanks>& limits) {
  std::optional<MemoryShortage> worst;
  for (const LimitOfRanks& one : limits) {
    std::int64_t needed = counted_by(one.limit, memory), more = 0;
    if (one.ranks > 1 || !one.has_first) {
      needed -= memory.first_rank_only;
      if (one.has_first) more = memory.first_rank_only;
    }
    constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
    const auto available = static_cast<std::int64_t>(std::min(one.limit.available(), kMost));
    const std::int64_t missing = needed * one.ranks + more - available;
    if (missing > 0 && (!worst || missing > worst->missing)) worst = MemoryShortage{one, needed, more, missing};
  }
  return worst;
}

std::string prediction_text(const TrainingMemory& memory) {
  std::string text = fmt::format("predicted: {}", memory.peak.text());
  for (std::size_t i = 0; i < memory.buffers.size(); ++i) {
    text += fmt::format("{}{} {}", i == 0 ? " (" : ", ", memory.buffers[i].first, bytes_text(memory.buffers[i].second));
  }
  if (!memory.buffers.empty()) text += ")";
  text += fmt::format("; {} beside tensors", bytes_text(memory.runtime));
  if (memory.on_host > 0) text += fmt::format("; {} of the host's memory", bytes_text(memory.on_host));
  if (memory.first_rank_only > 0) {
    text +=
        fmt::format("; {} of it on rank 0 alone, for checkpoint.last_save_in_hf", bytes_text(memory.first_rank_only));
  }
  if (memory.thread_stacks > 0) {
    text += fmt::format("; {} of threads' stacks, for RLIMIT_DATA and RLIMIT_AS", bytes_text(memory.thread_stacks));
  }
  return text;
}

std::string comparison_text(const TrainingMemory& predicted, const observe::MemoryCounts& counted) {
  std::string text = fmt::format("counted until then: {} of {} predicted", bytes_text(counted.total()),
                                 bytes_text(predicted.peak.total()));
  for (std::size_t c = 0; c < observe::kMemoryCategories; ++c) {
    const std::int64_t found = counted.bytes[c], expected = predicted.peak.bytes[c];
    const std::int64_t allowed = std::max(expected / 20, kHardlyMore);
    text += fmt::format("\n    {:<12} {:>8} of {:>8}{}", observe::name_of(static_cast<observe::MemoryCategory>(c)),
                        bytes_text(found), bytes_text(expected),
                        found > expected + allowed ? fmt::format(", {} more", bytes_text(found - expected)) : "");
  }
  return text;
}

std::string shortage_text(const MemoryShortage& shortage, const TrainingMemory& memory) {
  const MemoryLimit& limit = shortage.limit.limit;
  std::string counted;
  if (limit.counts == MemoryLimit::Counts::private_memory && memory.peak.shared > 0) {
    counted =
        fmt::format(" beside {} of shared memory, which this limit does not count", bytes_text(memory.peak.shared));
  } else if (limit.counts == MemoryLimit::Counts::mappings && memory.mapped > 0) {
    counted =
        fmt::format(", with {} of the other ranks' memory, which this limit counts, too", bytes_text(memory.mapped));
  }
  if (shortage.more > 0) counted += fmt::format(", rank 0 {} more", bytes_text(shortage.more));
  const std::string sharers = shortage.limit.ranks > 1 ? fmt::format(", for {} ranks", shortage.limit.ranks) : "";
  return fmt::format("needs {}{}; there are {}{}: {} are missing\n  limit: {}\n  {}", bytes_text(shortage.needed),
                     counted, bytes_text(static_cast<std::int64_t>(limit.available())), sharers,
                     bytes_text(shortage.missing), limit.text(), prediction_text(memory));
}

std::vector<std::string> remedies(const TrainingShape& shape, const std::function<bool(const TrainingMemory&)>& fits) {
  return Remedies(shape, fits).find();
}

std::string largest_saving(const TrainingShape& shape) {
  return Remedies(shape, [](const TrainingMemory&) { return true; }).largest_saving();
}

}  // namespace phalanx::plan
