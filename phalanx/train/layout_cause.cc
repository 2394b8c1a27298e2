#include "phalanx/train/layout_cause.h"

#include <ATen/TensorOperators.h>
#include <fmt/format.h>

#include <cmath>
#include <optional>

#include "phalanx/tensor/box.h"

namespace phalanx::train {
namespace {

// Far above rounding, far below one rank's share of anything.
constexpr double kSame = 1e-3;

at::Tensor part_of(const at::Tensor& whole, const std::optional<Box>& box) {
  at::Tensor part = whole;
  for (std::size_t dim = 0; box && dim < box->shape.size(); ++dim) {
    part = part.narrow(static_cast<std::int64_t>(dim), box->offsets[dim], box->shape[dim]);
  }
  return part;
}

double norm_of(const at::Tensor& x) { return x.norm().item<double>(); }

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && norm_of(a - b) <= kSame * norm_of(b);
}

std::string scaled_text(double factor, const DeviceMesh& mesh) {
  const auto is = [&](double other) { return std::abs(factor / other - 1) < kSame; };
  std::string ranks;
  for (const auto& axis : mesh.axes()) {
    if (axis.size == 1) continue;
    if (is(axis.size)) ranks += fmt::format("{}{}", ranks.empty() ? "" : " or ", axis.name);
  }
  if (!ranks.empty()) {
    return fmt::format("{:.4g} times too large: summed where it should be averaged over {}, or counted {:.0f} times",
                       factor, ranks, factor);
  }
  for (const auto& axis : mesh.axes()) {
    if (axis.size > 1 && is(1.0 / axis.size)) {
      return fmt::format("{:.4g} times too small: divided by the ranks of {} once too often, or one share of {} alone",
                         1.0 / factor, axis.name, axis.size);
    }
  }
  if (is(2)) return "twice as large as it should be: summed twice";
  return fmt::format("{:.4g} times what it should be: a wrong factor", factor);
}

std::optional<std::string> own_guess(const at::Tensor& found, const SuspectValue& value, const std::optional<Box>& box,
                                     const DeviceMesh& mesh) {
  const at::Tensor expected = part_of(value.expected, box);
  if (!std::isfinite(norm_of(found))) return "it is not finite";
  if (norm_of(found) == 0) return "it is zero: nothing was computed here, or it was dropped on the way";
  if (value.before.defined() && same(found, part_of(value.before, box))) {
    return "stale: it is the value of the step before";
  }
  const double squares = norm_of(expected) * norm_of(expected);
  const double factor = squares > 0 ? (found * expected).sum().item<double>() / squares : 0;
  if (std::abs(factor) > kSame && same(found / factor, expected)) return scaled_text(factor, mesh);
  return std::nullopt;
}

/// Another rank's part of the same shape.
std::optional<std::string> swapped_guess(const at::Tensor& found, const SuspectValue& value) {
  const auto& shard = value.found.shard;
  if (!shard) return std::nullopt;
  for (int rank = 0; rank < shard->spec.mesh().size(); ++rank) {
    const Box box = shard->spec.local_box(rank);
    if (box.shape == shard->box().shape && box.offsets != shard->box().offsets &&
        same(found, part_of(value.expected, box))) {
      return fmt::format("wrong shard: it has the part of rank {}", rank);
    }
  }
  return std::nullopt;
}

}  // namespace

std::string likely_cause(const SuspectValue& value, const DeviceMesh& mesh, Communicator& world, int of) {
  const bool is_here = value.found.tensor.defined();
  const auto box = is_here && value.found.shard ? std::optional(value.found.shard->box()) : std::nullopt;
  at::Tensor found;
  std::string guess;
  if (is_here) {
    found = value.found.tensor.detach().to(at::kCPU, at::kDouble);
    if (const auto own = own_guess(found, value, box, mesh)) {
      guess = *own;
    } else if (const auto swapped = swapped_guess(found, value)) {
      guess = *swapped;
    }
  }
  // What the ranks of an axis have together; they have the same part where the axis does not cut it.
  for (const auto& axis : mesh.axes()) {
    if (axis.size == 1) continue;
    const auto& ranks = mesh.communicator(axis.name);
    const std::string mine = !is_here ? "nothing" : box ? box->text() : "whole";
    bool alike = is_here;
    for (const std::string& other : ranks->all_gather_bytes(mine)) alike = alike && other == mine;
    // All of them decide alike: one that has nothing makes its whole group pass.
    if (!alike) continue;
    const at::Tensor sum = found.clone();
    ranks->all_reduce(sum);
    if (!guess.empty()) continue;
    const at::Tensor expected = part_of(value.expected, box);
    if (same(sum, expected)) {
      guess = fmt::format("not summed over {}: each rank has its own addend", axis.name);
    } else if (same(sum / axis.size, expected)) {
      guess = fmt::format("not averaged over {}: each rank has its own", axis.name);
    }
  }
  if (guess.empty())
    guess = "no simple mistake explains it: look at what computes it, and at values that it depends on";
  return world.broadcast_bytes(guess, of);
}

}  // namespace phalanx::train
