#include "phalanx/plan/pipeline_memory.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "phalanx/plan/activation_memory.h"
#include "phalanx/plan/cut_model.h"
#include "phalanx/schedule/actions.h"

namespace phalanx::plan {
namespace {

using models::LlamaPart;
using schedule::Action;
using schedule::ActionKind;

// One micro-batch in one stage.
struct StageBytes {
  std::int64_t kept = 0;      // from F on, for the backward pass
  std::int64_t left = 0;      // from I on, for W
  std::int64_t during_f = 0;  // beside what is kept, at the moment of F when most is there,
  std::int64_t during_b = 0;  // of B,
  std::int64_t during_i = 0;  // and of I;
  std::int64_t during_w = 0;  // beside what is left, of W
  std::int64_t weights = 0;
};

// Backward passes go from the head to the embedding, and let go of what they are through with; so does W.
StageBytes stage_bytes(const TrainingShape& shape, const LlamaPart& part, bool has_buckets) {
  const CutModel m(shape);
  const ActivationBytes bytes = activation_sizes(shape);
  const std::int64_t costly = shape.keeps_costly ? bytes.kept : 0;
  const std::int64_t head = part.head ? bytes.head : 0, head_left = part.head ? bytes.head_left : 0;
  const std::int64_t table = shape.weight_bytes * (m.table() + (part.embedding ? m.positions : 0));
  StageBytes stage;
  stage.weights = shape.weight_bytes * m.parameters(part, shape.model.tie_embeddings);
  std::int64_t layer = 0, again = 0;  // of one layer, to be computed again
  for (std::int64_t half = part.begin; half < part.end; ++half) {
    const bool is_attention = half % 2 == 0;
    const bool is_first = half == part.begin || is_attention;  // of its layer here
    const std::int64_t of_half = is_attention ? bytes.attention : bytes.feed_forward;
    layer = (is_first ? 0 : layer) + of_half;
    if (!is_recomputed(shape, half / 2)) {
      stage.kept += of_half;
    } else {
      if (is_first) stage.kept += bytes.input + costly;
      again = std::max(again, layer - costly);
    }
    stage.left += is_attention ? bytes.attention_left : bytes.feed_forward_left;
  }
  // Without a place where they are wanted gradients are tensors of their own, added to those that are there: of a
  // feed-forward net at once, in W of one matrix.
  const bool has_halves = part.end > part.begin;
  const std::int64_t product = has_buckets ? 0 : shape.weight_bytes * m.feed_forward_matrices();
  const std::int64_t grown = std::max(stage.left - stage.kept, std::int64_t{0});
  stage.during_f = bytes.forward;
  if (has_halves) {
    stage.during_b = bytes.backward + again + product - head;
    stage.during_i = grown + bytes.input_backward + again + head_left - head;
    stage.during_w = product / (m.nets * m.matrices_of_net) - head_left;
  }
  stage.kept += head;
  stage.left += head_left;
  if (part.head) {
    stage.during_f = std::max(stage.during_f, bytes.loss - head);
    const std::int64_t made = head_left > 0 ? table : 0;  // later ones are made beside the gradient
    stage.during_b = std::max(stage.during_b, bytes.loss_backward + made);
    stage.during_i = std::max(stage.during_i, bytes.loss_backward);
    stage.during_w = std::max(stage.during_w, made);
  }
  if (part.embedding) {
    stage.left += bytes.input;
    const std::int64_t made = has_buckets ? 0 : table;
    stage.during_b = std::max(stage.during_b, made + bytes.input - stage.kept);
    stage.during_w = std::max(stage.during_w, made + bytes.input - stage.left);
  }
  return stage;
}

}  // namespace

std::vector<PipelineMoment> pipeline_moments(const TrainingShape& shape, std::size_t rank, bool has_buckets) {
  const PipelineShape& pipeline = *shape.pipeline;
  std::map<int, StageBytes> stages;
  std::map<int, int> to_come;  // B or W of each stage
  for (const int stage : pipeline.schedule.stages_of(static_cast<int>(rank))) {
    stages[stage] = stage_bytes(shape, pipeline.parts[static_cast<std::size_t>(stage)], has_buckets);
  }
  const auto& row = pipeline.schedule.actions[rank];
  for (const Action& action : row) {
    schedule::for_each_part(action, [&](const Action& part) {
      if (schedule::ends_micro_batch(part.kind)) ++to_come[part.stage];
    });
  }
  // Beside them, at each end of a stage: towards another rank, a tensor that is on its way and those that have been
  // asked for; towards a stage of this rank, what one has made for the other.
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
  std::vector<PipelineMoment> moments;
  for (const Action& action : row) {
    schedule::for_each_part(action, [&](const Action& part) {
      const StageBytes& stage = stages.at(part.stage);
      const bool ends = schedule::ends_micro_batch(part.kind);
      std::int64_t during = 0, after = 0;
      switch (part.kind) {
        case ActionKind::forward:
          during = stage.kept + stage.during_f;
          after = stage.kept;
          break;
        case ActionKind::input_backward:
          during = stage.during_i;
          after = stage.left - stage.kept;
          break;
        case ActionKind::weight_backward:
          during = stage.during_w;
          after = -stage.left;
          break;
        default:  // the stage's last B is both halves, one after the other
          during = to_come[part.stage] == 1 ? std::max(stage.during_i, stage.left - stage.kept + stage.during_w)
                                            : stage.during_b;
          after = -stage.kept;
      }
      moments.push_back({live + during, has_buckets ? 0 : gradients});
      live += after;
      if (!ends) return;
      --to_come[part.stage];
      if (has_gradients.insert(part.stage).second) gradients += stage.weights;
      moments.push_back({live, has_buckets ? 0 : gradients});
    });
  }
  return moments;
}

}  // namespace phalanx::plan
