#include "phalanx/verify/document_probe.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "phalanx/base/ignored_label.h"
#include "phalanx/train/autocast_guard.h"

namespace phalanx::verify {
namespace {

constexpr std::size_t kProbes = 4;       // documents that are changed
constexpr std::int64_t kNeighbours = 8;  // labels of a neighbour
constexpr double kExpertsTolerance = 1e-5;

/// Places [begin, begin + count) of a row have the labels that are compared.
struct Probe {
  std::int64_t row, changed, begin, count;
};

/// Neighbours in one row, both ways; padding, which has no labels, is no neighbour.
std::vector<Probe> probes_of(const train::TokenBatch& batch) {
  std::vector<Probe> probes;
  if (!batch.documents) return probes;
  const at::Tensor labels = batch.labels.cpu();
  const std::int64_t seq = labels.size(1);
  const auto has_label = [&](std::int64_t row, std::int64_t place) {
    return labels[row][place].item<std::int64_t>() != kIgnoredLabel;
  };
  for (std::int64_t row = 0; row < labels.size(0) && probes.size() < kProbes; ++row) {
    const auto ends = batch.documents->of_row(row);
    for (std::size_t i = 0; i + 2 < ends.size() && probes.size() < kProbes; ++i) {
      const std::int64_t first = ends[i] - row * seq, second = ends[i + 1] - row * seq, end = ends[i + 2] - row * seq;
      if (has_label(row, second)) probes.push_back({row, second - 1, second, std::min(kNeighbours, end - second)});
      const std::int64_t from = std::max(first, second - kNeighbours);
      if (has_label(row, from)) probes.push_back({row, second, from, second - from});
    }
  }
  probes.resize(std::min(probes.size(), kProbes));
  return probes;
}

double loss_of(LayoutSide& side, const train::TokenBatch& batch) {
  const train::AutocastGuard autocast(side.options.device.type(), side.options.autocast);
  return side.model->loss_sum(batch).item<double>();
}

}  // namespace

std::string DocumentLeak::text() const {
  return fmt::format(
      "row {}: when token {} was changed, the loss of the document that begins at {} moved from {:.9g} to {:.9g}: "
      "attention or positions cross the boundary between two documents",
      row, changed, begin, before, after);
}

std::optional<DocumentLeak> find_document_leak(LayoutSide& side) {
  const at::NoGradGuard no_grad;
  const ParallelPlan& parallel = side.plan.parallel;
  const data::RowRange rows = side.data.dataloader->rows_of({.rank = parallel.data_parallel_rank(side.options.rank),
                                                             .ranks = parallel.data_parallel_size(),
                                                             .micro_batch = 0,
                                                             .micro_batches = side.plan.accumulation_steps});
  const train::TokenBatch batch = train::load_batch(*side.data.dataloader, 0, rows, side.options.device);
  const std::vector<Probe> probes = probes_of(batch);
  const double tolerance = side.model->model().config().has_experts() ? kExpertsTolerance : 0.0;
  std::optional<DocumentLeak> leak;
  for (std::size_t i = 0; i < kProbes; ++i) {
    train::TokenBatch probed = batch;
    if (i < probes.size()) {
      const auto [row, changed, begin, count] = probes[i];
      probed.labels = at::full_like(batch.labels, kIgnoredLabel);
      probed.labels[row].narrow(0, begin, count).copy_(batch.labels[row].narrow(0, begin, count));
    }
    const double before = loss_of(side, probed);
    if (i < probes.size()) {
      const auto vocab = side.model->model().config().vocab_size;
      probed.inputs = batch.inputs.clone();
      at::Tensor token = probed.inputs[probes[i].row][probes[i].changed];
      token.add_(1).remainder_(vocab);
    }
    const double after = loss_of(side, probed);
    if (i >= probes.size() || leak || std::abs(after - before) <= tolerance * std::abs(before)) continue;
    leak = DocumentLeak{probes[i].row, probes[i].changed, probes[i].begin, before, after};
  }
  return leak;
}

}  // namespace phalanx::verify
