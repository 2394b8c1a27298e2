#include "phalanx/plan/pipeline_memory.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "phalanx/plan/activation_memory.h"
#include "phalanx/plan/model_partition.h"
#include "phalanx/plan/unit_shapes.h"
#include "phalanx/schedule/actions.h"

namespace phalanx::plan {
namespace {

using models::LlamaPart;
using schedule::Action;
using schedule::ActionKind;

// The memory of one micro-batch in one stage.
struct StageBytes {
  std::int64_t saved = 0;                   // from F on, for the backward pass
  std::int64_t left = 0;                    // from I (backward_input) on, for W (backward_weight)
  std::int64_t during_forward = 0;          // the peak of F, beside the saved activations
  std::int64_t during_backward = 0;         // the peak of B
  std::int64_t during_backward_input = 0;   // the peak of I
  std::int64_t during_backward_weight = 0;  // the peak of W, beside `left`
  std::int64_t during_loss = 0;             // the peak of B at the loss
  std::int64_t made = 0, first_made = 0;    // by B or W: the output layer's gradient, beside the existing one
  std::int64_t weights = 0;                 // bytes of the gradients of all weights
  std::int64_t copies = 0;                  // of these, of weights that another stage has too
};

// Backward passes go from the head to the embedding, and free what they no longer need; so does W.
StageBytes stage_bytes(const TrainingShape& shape, const LlamaPart& part, GradientStorage storage) {
  // Gradients of another type than the units' are made as tensors, and moved into the units after each micro-batch.
  const bool has_place = storage == GradientStorage::buckets ||
                         (storage == GradientStorage::units && shape.gather_bytes == shape.reduce_bytes);
  const ModelPartition m(shape);
  const ActivationBytes bytes = activation_sizes(shape);
  const std::int64_t costly = shape.uses_op_sac ? bytes.saved : 0;
  const std::int64_t head = part.head ? bytes.head : 0, head_deferred = part.head ? bytes.head_deferred : 0;
  const std::int64_t element = storage == GradientStorage::units ? shape.gather_bytes : shape.weight_bytes;
  const bool has_table = (part.head && trains_output(shape)) || (part.embedding && trains_embedding(shape));
  const std::int64_t table = has_table ? element * (m.table() + (part.embedding ? m.positions : 0)) : 0;
  StageBytes stage;
  stage.weights = element * elements_of_part(shape, part).trained;
  if (shape.model.tie_embeddings && part.embedding != part.head && trains_embedding(shape)) {
    stage.copies = (storage == GradientStorage::units ? shape.reduce_bytes : shape.weight_bytes) * m.table();
  }
  std::int64_t layer = 0, again = 0;  // of one layer, to be recomputed
  for (std::int64_t half = part.begin; half < part.end; ++half) {
    const bool is_attention = half % 2 == 0;
    const bool is_first = half == part.begin || is_attention;  // the first half of its layer in this part
    const std::int64_t of_half = is_attention ? bytes.attention : bytes.feed_forward;
    layer = (is_first ? 0 : layer) + of_half;
    if (!is_recomputed(shape, half / 2)) {
      stage.saved += of_half;
    } else {
      if (is_first) stage.saved += bytes.input + costly;
      again = std::max(again, layer - costly);
    }
    stage.left += is_attention ? bytes.attention_deferred : bytes.feed_forward_deferred;
  }
  // Without storage in buckets or units, new gradients are separate tensors that are added to the existing ones. In B
  // these are those of one feed-forward net at once (one expert; for GPT-2 one matrix, as its layers are not fused), in
  // W those of one matrix.
  const bool has_halves = part.end > part.begin;
  const bool adds_matrices = !has_place && shape.lora.rank == 0;  // adapters are small
  const std::int64_t matrix = adds_matrices ? element * m.feed_forward_matrices() / (m.nets * m.matrices_of_net) : 0;
  const std::int64_t product = matrix * (shape.model.is_gpt2() ? 1 : m.matrices_of_net);
  const std::int64_t grown = std::max(stage.left - stage.saved, std::int64_t{0});
  stage.during_forward = bytes.forward;
  if (has_halves) {
    stage.during_backward = bytes.backward + again + product - head;
    stage.during_backward_input = grown + bytes.backward_input + again + head_deferred - head;
    stage.during_backward_weight = matrix - head_deferred;
  }
  stage.saved += head;
  stage.left += head_deferred;
  if (part.head) {
    stage.during_forward = std::max(stage.during_forward, bytes.loss - head);
    stage.during_loss = bytes.loss_backward;
    stage.during_backward_input = std::max(stage.during_backward_input, bytes.loss_backward);
    stage.made = head_deferred > 0 ? table : 0;
    stage.first_made = has_place ? 0 : stage.made;
  }
  if (part.embedding) {
    stage.left += bytes.input;
    const std::int64_t made = has_place ? 0 : table;
    stage.during_backward = std::max(stage.during_backward, made + bytes.input - stage.saved);
    stage.during_backward_weight = std::max(stage.during_backward_weight, made + bytes.input - stage.left);
  }
  return stage;
}

// The rebuilt buckets of a stage, in the order in which its gradients arrived. When the last gradient has arrived, they
// exist beside the first buckets.
std::int64_t rebuilt_bucket_bytes(const StageBytes& stage) { return stage.weights > kFirstBucket ? stage.weights : 0; }

}  // namespace

std::vector<PipelineMemorySample> pipeline_memory_timeline(const TrainingShape& shape, std::size_t rank,
                                                           GradientStorage storage) {
  const PipelineShape& pipeline = *shape.pipeline;
  std::map<int, StageBytes> stages;
  std::map<int, int> to_come;  // B or W of each stage
  for (const int stage : pipeline.schedule.stages_of(static_cast<int>(rank))) {
    stages[stage] = stage_bytes(shape, pipeline.parts[static_cast<std::size_t>(stage)], storage);
  }
  const auto& row = pipeline.schedule.actions[rank];
  for (const Action& action : row) {
    schedule::for_each_sub_action(action, [&](const Action& part) {
      if (schedule::ends_micro_batch(part.kind)) ++to_come[part.stage];
    });
  }
  // In addition, at each end of a stage: towards another rank, a tensor in flight and those that are posted; towards a
  // stage of this rank, the tensor that one has made for the other.
  constexpr std::int64_t kMessages = 3;
  std::int64_t messages = 0;
  for (const auto& [stage, bytes] : stages) {
    for (const int other : {stage - 1, stage + 1}) {
      if (other < 0 || other >= pipeline.schedule.stages()) continue;
      messages += schedule::on_different_ranks(pipeline.schedule, stage, other) ? kMessages : 1;
    }
  }
  std::int64_t live = messages * activation_sizes(shape).input, gradients = 0;
  std::set<int> has_gradients;
  std::vector<PipelineMemorySample> moments;
  for (const Action& action : row) {
    schedule::for_each_sub_action(action, [&](const Action& part) {
      const StageBytes& stage = stages.at(part.stage);
      const bool ends = schedule::ends_micro_batch(part.kind);
      const std::int64_t made = has_gradients.contains(part.stage) ? stage.made : stage.first_made;
      const std::int64_t during_backward = std::max(stage.during_backward, stage.during_loss + made);
      const std::int64_t during_backward_weight = std::max(stage.during_backward_weight, made);
      std::int64_t during = 0, after = 0;
      switch (part.kind) {
        case ActionKind::forward:
          during = stage.saved + stage.during_forward;
          after = stage.saved;
          break;
        case ActionKind::backward_input:
          during = stage.during_backward_input;
          after = stage.left - stage.saved;
          break;
        case ActionKind::backward_weight:
          during = during_backward_weight;
          after = -stage.left;
          break;
        default:  // the stage's last B is both parts, one after the other
          during = to_come[part.stage] == 1
                       ? std::max(stage.during_backward_input, stage.left - stage.saved + during_backward_weight)
                       : during_backward;
          after = -stage.saved;
      }
      moments.push_back({live + during, gradients});
      live += after;
      if (!ends) return;
      const bool is_last = --to_come[part.stage] == 0;
      const bool is_first = has_gradients.insert(part.stage).second;
      std::int64_t for_now = 0;
      if (storage == GradientStorage::tensors) {
        if (is_first) gradients += stage.weights;
      } else if (storage == GradientStorage::units) {
        for_now = shape.gather_bytes == shape.reduce_bytes ? 0 : stage.weights;
      } else if (is_last && stage.copies == 0) {
        for_now = rebuilt_bucket_bytes(stage);
      }
      moments.push_back({live, gradients + for_now});
    });
  }
  // For tied parameters: the gradient of each stage that has a copy, and their sum.
  std::int64_t copied = 0, anew = 0;
  for (const auto& [stage, bytes] : stages) {
    if (bytes.copies == 0) continue;
    copied = bytes.copies;
    if (storage == GradientStorage::buckets) anew = std::max(anew, rebuilt_bucket_bytes(bytes));
  }
  moments.push_back({live + 3 * copied, gradients + anew});
  return moments;
}

}  // namespace phalanx::plan
