#include "phalanx/plan/memory_model.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "phalanx/layout/context_cut.h"
#include "phalanx/layout/flat_layout.h"
#include "phalanx/plan/activation_memory.h"
#include "phalanx/plan/model_partition.h"
#include "phalanx/plan/nccl_memory.h"
#include "phalanx/plan/pipeline_memory.h"
#include "phalanx/plan/unit_shapes.h"

namespace phalanx::plan {
namespace {

using fsdp::FlatLayout;
using observe::MemoryCategory;

// For all-gathers, and for gradients: one in use, one in flight; of divided experts, which are a unit inside of another
// one, one more.
std::int64_t pooled_units(const TrainingShape& shape) { return shape.expert_parallel_size > 1 ? 3 : 2; }

// Private memory outside of tensors, allocated after the start. The smallest limits under which runs succeed
// (docs/memory_estimate.md) are matched by a constant for threads' stacks and libraries' buffers, plus a share of the
// activations for gaps in the heap. glibc's heap returns blocks of 32 MiB and more, so above that there are hardly any
// gaps.
constexpr std::int64_t kHostRuntime = 36 << 20;
constexpr std::int64_t kDeviceRuntime = 512 << 20;
constexpr std::int64_t kNeverInHeap = 32 << 20;
constexpr double kGaps = 0.4, kGapsBetweenLarge = 0.1;

class Prediction {
 public:
  /// `rank`: in a pipeline.
  Prediction(const TrainingShape& shape, std::size_t rank)
      : s_(shape),
        model_(shape),
        rank_(rank),
        parts_(parts_of(shape, rank)),
        counts_(count_elements()),
        weights_(counts_.all()) {
    const bool copies = std::ranges::any_of(parts_, [&](const auto& part) { return has_copy(part); });
    stepped_ = counts_.trained - (copies && trains_embedding(s_) ? model_.table() : 0);
  }

  TrainingMemory run() {
    s_.shards > 1 ? shard() : replicate();
    if (s_.async_checkpoint) {
      const std::int64_t bytes = stepped_ * s_.weight_bytes + counts_.frozen * s_.frozen_bytes() + counts_.nf4_bytes +
                                 bytes_of_optimizer(stepped_, counts_.matrices);
      const std::int64_t of_rank = bytes / s_.ranks();
      s_.on_device ? void(memory_.on_host += of_rank) : buffer("copy of the state that is being saved", of_rank);
    }
    take_highest_moment();
    const std::int64_t activations = memory_.peak[MemoryCategory::activations];
    memory_.runtime = beside_tensors(activations);
    memory_.first_rank_only = export_only_ + memory_.runtime - beside_tensors(activations - export_only_);
    memory_.thread_stacks = s_.thread_stacks;
    std::ranges::sort(memory_.buffers, std::greater(), [](const auto& b) { return b.second; });
    return memory_;
  }

 private:
  // The parts of the model on the rank.
  static std::vector<models::LlamaPart> parts_of(const TrainingShape& shape, std::size_t rank) {
    if (!shape.pipeline) return {models::full_llama(shape.model)};
    std::vector<models::LlamaPart> parts;
    for (const int stage : shape.pipeline->schedule.stages_of(static_cast<int>(rank))) {
      parts.push_back(shape.pipeline->parts[static_cast<std::size_t>(stage)]);
    }
    return parts;
  }
  ElementCounts count_elements() const {
    ElementCounts sum;
    for (const models::LlamaPart& part : parts_) sum.add(elements_of_all_experts(s_, part));
    return sum;
  }
  // If tied embeddings are on two stages, the last stage's are the weights; the first stage copies their values.
  bool has_copy(const models::LlamaPart& part) const { return s_.model.tie_embeddings && part.embedding && !part.head; }

  /// Of so many parameters, of which `matrices` are those of Muon.
  std::int64_t bytes_of_optimizer(std::int64_t parameters, std::int64_t matrices) const {
    const std::int64_t of_matrices = s_.matrix_copies.value_or(s_.optimizer_copies);
    const std::int64_t copies = s_.optimizer_copies + (s_.has_masters() ? 1 : 0);
    return parameters * (kFloatBytes * copies - 2 * s_.narrow_copies) +
           kFloatBytes * matrices * (of_matrices - s_.optimizer_copies);
  }

  std::int64_t beside_tensors(std::int64_t activations) const {
    if (s_.on_device) return kDeviceRuntime + nccl_bytes(s_);
    const bool in_heap = kFloatBytes * s_.batch * s_.local_seq() * model_.feed_forward_hidden < kNeverInHeap;
    return kHostRuntime +
           static_cast<std::int64_t>((in_heap ? kGaps : kGapsBetweenLarge) * static_cast<double>(activations));
  }

  void add(MemoryCategory category, std::int64_t bytes) { memory_.peak[category] += bytes; }
  // Adds memory on the device where the optimizer steps.
  void add_of_shards(MemoryCategory category, std::int64_t bytes) {
    if (s_.offload && s_.on_device) {
      memory_.on_host += bytes;
    } else {
      add(category, bytes);
    }
  }
  // Adds memory of a shared window.
  void add_shared(MemoryCategory category, std::int64_t bytes) {
    add_shared(category, bytes, s_.shards > 1 ? s_.shards : s_.ranks());
  }
  // Of so many ranks.
  void add_shared(MemoryCategory category, std::int64_t bytes, std::int64_t ranks) {
    add(category, bytes);
    if (!s_.shares_memory || ranks == 1) return;
    memory_.peak.shared += bytes;
    memory_.mapped += bytes * (ranks - 1);
  }
  void buffer(const std::string& name, std::int64_t bytes) {
    if (bytes > 0) memory_.buffers.emplace_back(name, bytes);
    add(MemoryCategory::buffers, bytes);
  }
  void shared_buffer(const std::string& name, std::int64_t bytes) {
    if (bytes > 0) memory_.buffers.emplace_back(name, bytes);
    add_shared(MemoryCategory::buffers, bytes);
  }

  void replicate() {
    const std::int64_t bytes = counts_.trained * s_.weight_bytes;
    add(MemoryCategory::parameters, bytes + counts_.frozen * s_.frozen_bytes() + counts_.nf4_bytes);
    if (s_.ranks() > 1) {
      add_shared(MemoryCategory::gradients, bytes);
      // Buckets are rebuilt in the order in which gradients arrived; for a moment both sets exist. This happens after
      // the first backward pass or, with the order from a checkpoint, at its beginning.
      new_buckets_ = bytes > kFirstBucket ? bytes : 0;
    }
    add(MemoryCategory::optimizer, bytes_of_optimizer(stepped_, counts_.matrices));
  }

  void shard() {
    Pools all;
    std::int64_t padding = 0;
    for (const models::LlamaPart& part : parts_) {
      const Pools pools = shard_part(part, padding);
      all.gathered += std::min(pools.gathered_units, pooled_units(s_)) * pools.gathered;
      all.gradients += std::min(pools.units_of_gradients, pooled_units(s_)) * pools.gradients;
      all.kept += pools.kept;
      all.full_gradients += pools.full_gradients;
    }
    const std::string number = pooled_units(s_) == 3 ? "three" : "two";
    shared_buffer(number + (s_.pipeline ? " gathered units of each stage" : " gathered units"), all.gathered);
    shared_buffer(number + " units' gradients", all.gradients);
    shared_buffer("units kept by groups of ranks", all.kept);
    shared_buffer("whole gradients between micro-batches", all.full_gradients);
    memory_.padding = static_cast<double>(padding) / static_cast<double>(weights_);
  }

  // Units take turns in these buffers; each stage of a pipeline has its own.
  struct Pools {
    std::int64_t gathered_units = 0, gathered = 0;       // number of units, bytes of the largest
    std::int64_t units_of_gradients = 0, gradients = 0;  // number of units, bytes of the largest
    std::int64_t kept = 0, full_gradients = 0;
  };
  Pools shard_part(const models::LlamaPart& part, std::int64_t& padding) {
    // Of both kinds of parameters: whether those in use are the stored ones.
    const bool direct = s_.gather_bytes == s_.weight_bytes && !s_.offload;
    const bool direct_frozen = s_.frozen_gather_bytes() == s_.frozen_bytes() && !s_.offload;
    const bool adds_up = (s_.accumulates && !s_.accumulates_sharded_gradients()) || s_.pipeline;
    const std::int64_t sum_bytes =
        s_.accumulates_sharded_gradients() ? std::max(s_.reduce_bytes, kFloatBytes) : s_.reduce_bytes;
    Pools pools;
    for (const UnitShape& unit : unit_shapes(s_, part)) {
      const FlatLayout layout = fsdp::lay_out_flat(unit.parameters, static_cast<int>(unit.shards));
      const FlatLayout frozen = fsdp::lay_out_flat(unit.frozen, static_cast<int>(unit.shards));
      const std::int64_t flat = layout.flat_elements(), mine = layout.shard_elements;
      const FlatLayout nf4 = fsdp::lay_out_flat(unit.in_nf4, static_cast<int>(unit.shards));  // of bytes
      const std::int64_t in_use = flat * s_.gather_bytes + frozen.flat_elements() * s_.frozen_gather_bytes() +
                                  nf4.flat_elements();  // bytes of the unit
      padding += unit.count * (layout.padding() + frozen.padding()) * (s_.shards / unit.shards);
      const bool is_alone = unit.shards == 1;  // nothing to gather, nothing to reduce
      const bool resident = is_alone || unit.is_root || s_.zero_stage < 3 || !s_.reshard_after_forward;
      const bool own_grads = is_alone || unit.is_root || s_.zero_stage == 1;
      if (resident) add_shared(MemoryCategory::parameters, unit.count * in_use, unit.shards);
      for (const auto& [is_direct, bytes] : {std::pair{direct, mine * s_.weight_bytes},
                                             {direct_frozen, frozen.shard_elements * s_.frozen_bytes()},
                                             {!s_.offload, nf4.shard_elements}}) {
        if (!is_direct) add_of_shards(MemoryCategory::parameters, unit.count * bytes);
        if (is_direct && !resident) add_shared(MemoryCategory::parameters, unit.count * bytes, unit.shards);
      }
      if (own_grads) add_shared(MemoryCategory::gradients, unit.count * flat * s_.reduce_bytes);
      if (!own_grads || s_.offload) {
        note_averages(unit, mine * (own_grads ? s_.reduce_bytes : sum_bytes));
      }
      if (!unit.is_root || !has_copy(part)) {
        const std::int64_t matrices = flat == 0 ? 0 : unit.matrices * mine / flat;
        add_of_shards(MemoryCategory::optimizer, unit.count * bytes_of_optimizer(mine, matrices));
      }
      if (s_.reshard_group > 0 && !resident && !unit.is_inner) pools.kept += unit.count * in_use / s_.reshard_group;
      if (!resident) {
        pools.gathered_units += unit.count;
        pools.gathered = std::max(pools.gathered, in_use);
      }
      if (own_grads || flat == 0) continue;
      if (adds_up) {
        pools.full_gradients += unit.count * flat * s_.reduce_bytes;
      } else {
        pools.units_of_gradients += unit.count;
        pools.gradients = std::max(pools.gradients, flat * s_.reduce_bytes);
      }
    }
    return pools;
  }

  // Trained elements of each layer, without a pipeline.
  std::vector<std::int64_t> trained_in_layers() const {
    std::vector<std::int64_t> result;
    for (std::int64_t layer = 0; layer < s_.model.n_layers; ++layer) {
      if (!s_.trains_a_part() && layer > 0) {
        result.push_back(result.back());
      } else {
        result.push_back(elements_of_part(s_, {.begin = 2 * layer, .end = 2 * layer + 2}).trained);
      }
    }
    return result;
  }

  // This rank's rows of the units' averaged gradients: they exist from each unit's backward pass until they are reset.
  void note_averages(const UnitShape& unit, std::int64_t bytes) {
    if (s_.offload && s_.on_device) {
      memory_.on_host += unit.count * bytes;
      return;
    }
    const auto count = static_cast<std::size_t>(unit.count);
    if (!unit.is_inner) averages_.resize(averages_.size() + count);
    for (std::size_t i = averages_.size() - count; i < averages_.size(); ++i) averages_[i] += bytes;
  }
  // Those of the last `units` units, whose backward passes come first.
  std::int64_t averages_of(std::size_t units) const {
    const auto count = static_cast<std::ptrdiff_t>(std::min(units, averages_.size()));
    return std::accumulate(averages_.end() - count, averages_.end(), std::int64_t{0});
  }

  // For the n-th unit from the end, counted from 1: what is added to the averages of earlier passes while the backward
  // pass of the unit before it runs.
  std::int64_t on_its_way(std::size_t number) const {
    if (!s_.accumulates_sharded_gradients() || averages_.empty() || number == 0) return 0;
    const std::int64_t sum = averages_[averages_.size() - std::min(number, averages_.size())];
    return sum * s_.reduce_bytes / std::max(s_.reduce_bytes, kFloatBytes);
  }

  // In validation nothing is saved for a backward pass.
  std::int64_t validation_activations() const {
    TrainingShape shape = s_;
    if (s_.validation_batch > 0) shape.batch = s_.validation_batch;
    shape.accumulates = false;
    shape.pipeline.reset();
    const ActivationBytes bytes = activation_sizes(shape);
    return bytes.always + bytes.input + bytes.loss;
  }

  // The optimizer on a GPU copies gradients of 16 bits to float32, some at a time, and takes over changes of 16-bit
  // parameters with masters, for one parameter at a time with 11 bytes an element (optim/optimizer.cc). Parameters and
  // moments that it rounds are float32 for the step, in pieces, and rounded with 48 bytes an element (optim/adamw.cc).
  std::int64_t widened_for_the_step() const { return widened_gradients() + (s_.rounds_state() ? widened_state() : 0); }
  std::int64_t widened_state() const {
    constexpr std::int64_t kPiece = std::int64_t{1} << 22, kAtATime = std::int64_t{1} << 24;
    const std::int64_t stepped = stepped_ / s_.shards;
    return 3 * kFloatBytes * std::min(stepped, kAtATime + kPiece) + 48 * std::min(stepped, kPiece);
  }
  std::int64_t widened_gradients() const {
    constexpr std::int64_t kAtATime = std::int64_t{1} << 25;
    const bool has_narrow_gradients = (s_.shards > 1 ? s_.reduce_bytes : s_.weight_bytes) == 2;
    if (!has_narrow_gradients && !s_.has_masters()) return 0;
    const std::int64_t largest = trains_output(s_) ? model_.table() / s_.shards : 0,
                       others = has_narrow_gradients ? stepped_ / s_.shards - largest : 0;
    return kFloatBytes * std::min(others, kAtATime) + (s_.has_masters() ? 11 : kFloatBytes) * largest;
  }

  // Everything counted so far is always there. This adds the temporary memory at the moment of the peak.
  void take_highest_moment() {
    struct Moment {
      std::int64_t activations = 0, gradients = 0;
      std::int64_t total() const { return activations + gradients; }
    };
    std::vector<Moment> moments;
    // A single rank's gradients are made by the backward pass, and freed after the step.
    const bool makes_gradients = s_.ranks() == 1;
    const std::int64_t table = trains_output(s_) ? model_.table() : 0;
    if (s_.pipeline) {
      const GradientStorage storage = s_.shards > 1     ? GradientStorage::units
                                      : makes_gradients ? GradientStorage::tensors
                                                        : GradientStorage::buckets;
      for (const PipelineMemorySample& moment : pipeline_memory_timeline(s_, rank_, storage)) {
        moments.push_back({moment.activations, moment.gradients});
      }
    } else {
      const std::vector<std::int64_t> trained = trained_in_layers();
      // The gradients of earlier micro-batches are already there.
      const bool has_all = makes_gradients && s_.accumulates;
      const std::int64_t of_output = makes_gradients && !has_all ? table * s_.weight_bytes : 0;
      // By operators the output's gradient is made when most of what the loss needs is gone.
      const bool is_made_late = !s_.on_device && s_.weight_bytes < kFloatBytes;
      std::int64_t made = has_all ? counts_.trained * s_.weight_bytes : is_made_late ? 0 : of_output;
      // In the current block the experts finish one after the other. The gradients of one are made after the saved
      // activations of those before it are freed.
      const std::int64_t of_nets = s_.weight_bytes * model_.feed_forward_matrices();
      // The inputs and results of all experts stay until the last one has finished: they are parts of two tensors.
      const std::int64_t together = 2 * s_.weight_bytes * s_.batch * s_.local_seq() * model_.routed * model_.dim;
      const std::int64_t of_each = std::max<std::int64_t>(activation_sizes(s_).feed_forward - together, 0);
      const std::int64_t gone = std::min(of_nets, of_each) / model_.nets * (model_.nets - 1);
      // What is made of the current block's gradients at the moment of the peak: on a GPU all but the
      // attention's, since that moment is at the feed-forward layer. If older gradients are there, those of
      // one net are made beside them.
      const std::int64_t later = s_.on_device ? model_.attention() * s_.weight_bytes : 0;
      const std::int64_t beside = s_.on_device ? of_nets / model_.nets : 0;
      for (const std::int64_t activations : activation_memory_timeline(s_)) {
        const bool is_block = !moments.empty();
        const std::int64_t block = is_block ? trained[trained.size() - moments.size()] : 0;
        const double share =
            static_cast<double>(block) / static_cast<double>(model_.attention() + model_.feed_forward());
        // From the second pass on all of them are there, and those of this pass are added.
        const std::int64_t of_units = !s_.accumulates_sharded_gradients()
                                          ? averages_of(moments.size())
                                          : averages_of(averages_.size()) + on_its_way(moments.size());
        const std::int64_t of_block = !is_block || !makes_gradients ? 0 : has_all ? beside : -gone - later;
        if (is_block && makes_gradients && !has_all) made += block * s_.weight_bytes;
        moments.push_back(
            {activations, of_units + made + static_cast<std::int64_t>(share * static_cast<double>(of_block))});
        if (!is_block && is_made_late) made += of_output;
      }
    }
    const std::int64_t averages = averages_of(averages_.size());
    if (s_.pipeline) {
      moments.back().gradients += averages;
    } else {
      const std::int64_t all = makes_gradients ? counts_.trained * s_.weight_bytes : averages;
      const std::size_t units = averages_.size();
      const std::int64_t of_first_units = units > 0 ? on_its_way(units) + on_its_way(units - 1) : 0;
      moments.push_back({0, all + new_buckets_ + of_first_units});
      if (s_.resumes) moments.push_back({moments.front().activations, new_buckets_});
      if (s_.on_device && !s_.offload) moments.push_back({widened_for_the_step(), all});
    }
    if (s_.validation_batch != 0) moments.push_back({validation_activations(), 0});
    if (s_.exports_at_end && (s_.shards > 1 || s_.uses_model_parallelism())) {
      // The embedding is the largest parameter; only the first rank holds the parameters before it.
      moments.push_back({s_.model.vocab_size * s_.model.dim * kFloatBytes, 0});
      const std::int64_t of_others = std::ranges::max_element(moments, {}, &Moment::total)->total();
      export_only_ = std::max<std::int64_t>(s_.model.parameter_count() * kFloatBytes - of_others, 0);
      moments.push_back({s_.model.parameter_count() * kFloatBytes, 0});
    }
    const Moment highest = *std::ranges::max_element(moments, {}, &Moment::total);
    add(MemoryCategory::activations, highest.activations);
    if (makes_gradients || s_.shards > 1) {
      add(MemoryCategory::gradients, highest.gradients);
    } else {
      if (highest.gradients > 0) {
        memory_.buffers.emplace_back("of the gradients, buckets that are laid out anew", highest.gradients);
      }
      add_shared(MemoryCategory::gradients, highest.gradients);
    }
  }

  const TrainingShape& s_;
  const ModelPartition model_;
  const std::size_t rank_;
  const std::vector<models::LlamaPart> parts_;
  const ElementCounts counts_;  // of this rank, before they are sharded
  const std::int64_t weights_;  // of both kinds
  std::int64_t stepped_ = 0;    // of these, the parameters that this rank steps
  std::int64_t new_buckets_ = 0;
  std::vector<std::int64_t> averages_;  // of each unit with the one inside of it, in the order of use
  std::int64_t export_only_ = 0;        // part of the activations, on the first rank
  TrainingMemory memory_;
};

}  // namespace

std::int64_t TrainingShape::local_seq() const noexcept {
  if (context_parallel_size == 1) return seq;
  const ContextCut cut{.ranks = context_parallel_size,
                       .multiple = positions_multiple(tensor_parallel_size, sequence_parallel)};
  return cut.local(seq);
}

TrainingMemory predict_memory(const TrainingShape& shape) {
  TrainingMemory most = Prediction(shape, 0).run();
  for (std::size_t rank = 1; shape.pipeline && rank < shape.pipeline->schedule.actions.size(); ++rank) {
    TrainingMemory memory = Prediction(shape, rank).run();
    if (memory.total() > most.total()) most = std::move(memory);
  }
  return most;
}

TrainingMemory predict_memory_of_stage_rank(const TrainingShape& shape, std::size_t rank) {
  return Prediction(shape, rank).run();
}

}  // namespace phalanx::plan
