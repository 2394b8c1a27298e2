#include "phalanx/verify/document_probe.h"

#include <ATen/ops/full_like.h>
#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "phalanx/base/ignored_label.h"

namespace phalanx::verify {
namespace {

constexpr std::size_t kProbes = 4;  // an even number
constexpr double kExpertsTolerance = 1e-5, kNarrowExpertsTolerance = 1e-2;

struct Place {
  std::int64_t row, changed, compared;
};

/// Neighbours in one row, both ways: the last token of a document and the first of the next one, whether they have
/// labels or not. Padding, a document without any label, is no neighbour.
std::vector<Place> places_of(const train::TokenBatch& batch) {
  std::vector<Place> places;
  if (!batch.documents) return places;
  const at::Tensor has_label = batch.labels.cpu().ne(kIgnoredLabel);
  const std::int64_t seq = has_label.size(1);
  for (std::int64_t row = 0; row < has_label.size(0) && places.size() < kProbes; ++row) {
    const auto ends = batch.documents->of_row(row);
    const auto is_text = [&](std::size_t document) {
      const std::int64_t begin = ends[document] - row * seq, count = ends[document + 1] - ends[document];
      return has_label[row].narrow(0, begin, count).any().item<bool>();
    };
    for (std::size_t i = 1; i + 1 < ends.size() && places.size() < kProbes; ++i) {
      if (!is_text(i - 1) || !is_text(i)) continue;
      const std::int64_t begin = ends[i] - row * seq;  // of the later one
      places.push_back({.row = row, .changed = begin - 1, .compared = begin});
      places.push_back({.row = row, .changed = begin, .compared = begin - 1});
    }
  }
  return places;
}

double loss_of(LayoutSide& side, const train::TokenBatch& batch) {
  const at::Tensor loss = side.model->forward_backward(
      batch, {.optimizer_step = *side.optimizer_step, .divisor = 1, .autocast = side.options.autocast});
  side.drop_gradients();
  return loss.item<double>();
}

double tolerance_of(const LayoutSide& side, const train::TokenBatch& batch) {
  if (!side.model->model().config().has_experts()) return 0;
  const bool is_narrow = side.options.autocast || side.model->weights().front().tensor.scalar_type() != at::kFloat;
  return is_narrow && batch.documents ? kNarrowExpertsTolerance : kExpertsTolerance;
}

}  // namespace

std::string DocumentLeak::text() const {
  return fmt::format(
      "row {}: when token {} was changed, the loss of token {} of another document moved from {:.9g} to {:.9g}: "
      "attention crosses the boundary between two documents",
      row, changed, compared, before, after);
}

DocumentProbe probe_documents(LayoutSide& side) {
  const ParallelPlan& parallel = side.plan.parallel;
  const data::RowRange rows = side.data.dataloader->rows_of({.rank = parallel.data_parallel_rank(side.options.rank),
                                                             .ranks = parallel.data_parallel_size(),
                                                             .micro_batch = 0,
                                                             .micro_batches = side.plan.accumulation_steps});
  train::TokenBatch batch = train::load_batch(*side.data.dataloader, 0, rows, side.options.device);
  batch.preferences = nullptr;  // the losses are those of single tokens
  const std::vector<Place> places = places_of(batch);
  const double tolerance = tolerance_of(side, batch);
  const std::int64_t vocab = side.model->model().config().vocab_size;
  DocumentProbe probe{.compared = std::ssize(places)};
  for (std::size_t i = 0; i < kProbes; ++i) {
    train::TokenBatch probed = batch;
    if (i < places.size()) {
      const auto [row, changed, compared] = places[i];
      probed.labels = at::full_like(batch.labels, kIgnoredLabel);
      probed.labels[row][compared].copy_(batch.inputs[row][compared]);  // any label would do
    }
    const double before = loss_of(side, probed);
    if (i < places.size()) {
      probed.inputs = batch.inputs.clone();
      probed.inputs[places[i].row][places[i].changed].add_(1).remainder_(vocab);
    }
    const double after = loss_of(side, probed);
    // What is not finite is found by the steps that follow.
    const bool is_judged = i < places.size() && !probe.leak && std::isfinite(before) && std::isfinite(after);
    if (!is_judged || std::abs(after - before) <= tolerance * std::abs(before)) continue;
    probe.leak = DocumentLeak{.row = places[i].row,
                              .changed = places[i].changed,
                              .compared = places[i].compared,
                              .before = before,
                              .after = after};
  }
  return probe;
}

}  // namespace phalanx::verify
