#include "phalanx/verify/layout_cause.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <fmt/format.h>

#include <cmath>
#include <optional>

#include "phalanx/base/human.h"
#include "phalanx/layout/box.h"
#include "phalanx/tensor/narrow_to_box.h"

namespace phalanx::verify {
namespace {

// Far above rounding, far below one rank's share of anything.
constexpr double kSame = 1e-3;

double norm_of(const at::Tensor& x) { return x.norm().item<double>(); }

std::string scaled_text(double factor, const DeviceMesh& mesh) {
  const auto is = [&](double other) { return std::abs(factor / other - 1) < kSame; };
  std::string ranks;
  for (const auto& axis : mesh.axes()) {
    if (axis.size == 1) continue;
    if (is(axis.size)) ranks += fmt::format("{}{}", ranks.empty() ? "" : " or ", axis.name);
  }
  if (!ranks.empty()) {
    return fmt::format(
        "{:.4g} times too large: summed over {} where each rank has all of it, or divided by its own labels alone",
        factor, ranks);
  }
  for (const auto& axis : mesh.axes()) {
    if (axis.size > 1 && is(1.0 / axis.size)) {
      return fmt::format("{:.4g} times too small: divided by the ranks of {} once too often, or one share of {} alone",
                         1.0 / factor, axis.name, axis.size);
    }
  }
  if (is(-1)) return "it has the wrong sign";
  if (is(2)) return "twice as large as it should be: summed twice";
  return fmt::format("{:.4g} times what it should be: a wrong factor", factor);
}

std::optional<std::string> own_guess(const SuspectValue& value, const DeviceMesh& mesh) {
  const auto& [found, expected, before, part, others] = value;
  if (!std::isfinite(norm_of(found))) {
    const auto lost = found.numel() - at::isfinite(found).sum().item<std::int64_t>();
    return fmt::format("{} of its {} elements {} not finite", with_commas(lost), with_commas(found.numel()),
                       lost == 1 ? "is" : "are");
  }
  if (norm_of(found) == 0) return "it is zero: nothing was computed here, or it was dropped on the way";
  if (before.defined() && is_same_value(found, before)) return "stale: it is the value of the step before";
  const double squares = norm_of(expected) * norm_of(expected);
  const double factor = squares > 0 ? (found * expected).sum().item<double>() / squares : 0;
  const bool is_scaled = std::abs(factor) > kSame && std::abs(factor - 1) > kSame;
  if (is_scaled && is_same_value(found / factor, expected)) return scaled_text(factor, mesh);
  for (const auto& [rank, other] : others) {
    if (is_same_value(found, other)) return fmt::format("wrong shard: it has the part of rank {}", rank);
  }
  return std::nullopt;
}

/// Each part along a dimension is right, but some are in each other's places.
std::optional<std::string> moved_guess(const at::Tensor& found, const at::Tensor& expected, const char* of_what) {
  for (std::int64_t dim = 0; dim < found.dim(); ++dim) {
    for (std::int64_t parts = 2; parts <= 8; ++parts) {
      if (found.size(dim) % parts != 0 || found.size(dim) == 0) continue;
      const std::int64_t size = found.size(dim) / parts;
      std::string moved;
      bool all_known = true;
      for (std::int64_t i = 0; i < parts && all_known; ++i) {
        const at::Tensor mine = found.narrow(dim, i * size, size);
        if (is_same_value(mine, expected.narrow(dim, i * size, size))) continue;
        all_known = false;
        for (std::int64_t j = 0; j < parts && !all_known; ++j) {
          all_known = is_same_value(mine, expected.narrow(dim, j * size, size));
          if (!all_known) continue;
          moved += fmt::format("{}part {} has what part {} should have", moved.empty() ? "" : ", ", i, j);
        }
      }
      if (all_known && !moved.empty()) {
        return fmt::format("parts are in the wrong places: of {} along {} {}, {}", parts, of_what, dim, moved);
      }
    }
  }
  return std::nullopt;
}

/// If only one block of rows is wrong: what has happened to them.
std::optional<std::string> rows_guess(const SuspectValue& value, const DeviceMesh& mesh) {
  const std::int64_t rows = value.found.dim() > 0 ? value.found.size(0) : 0;
  const auto is_right = [&](std::int64_t row) {
    return is_same_value(value.found.select(0, row), value.expected.select(0, row));
  };
  std::int64_t begin = 0, end = rows;
  while (begin < end && is_right(begin)) ++begin;
  while (end > begin && is_right(end - 1)) --end;
  if (end - begin < 2 || end - begin == rows) return std::nullopt;
  const auto these = [&](const at::Tensor& x) { return x.defined() ? x.narrow(0, begin, end - begin) : x; };
  const auto guess = own_guess({.found = these(value.found),
                                .expected = these(value.expected),
                                .before = these(value.before),
                                .part = value.part},
                               mesh);
  if (!guess) return std::nullopt;
  return fmt::format("of {} rows {} to {} alone are wrong: {}", with_commas(rows), with_commas(begin),
                     with_commas(end - 1), *guess);
}

std::optional<std::string> damage_guess(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor f = found.contiguous(), e = expected.contiguous();
  const double size = norm_of(e) / std::sqrt(static_cast<double>(std::max<std::int64_t>(e.numel(), 1)));
  std::int64_t wrong = 0, first = 0, last = 0;
  for (std::int64_t i = 0; i < f.numel(); ++i) {
    const double has = f.const_data_ptr<double>()[i], should = e.const_data_ptr<double>()[i];
    if (std::abs(has - should) <= kSame * (std::abs(should) + size)) continue;
    if (wrong++ == 0) first = i;
    last = i;
  }
  if (wrong == 0 || wrong > std::max<std::int64_t>(1, f.numel() / 20)) return std::nullopt;
  if (wrong == 1) {
    return fmt::format("one element of {} is wrong, all others are right: damaged on the way, or written over",
                       with_commas(f.numel()));
  }
  if (last - first + 1 == wrong) {
    return fmt::format(
        "{} elements of {} are wrong, all others are right: those from number {} on: damaged on the way, "
        "or written over",
        with_commas(wrong), with_commas(f.numel()), with_commas(first));
  }
  return fmt::format("{} elements of {} are wrong, all others are right: spread from number {} to {}",
                     with_commas(wrong), with_commas(f.numel()), with_commas(first), with_commas(last));
}

}  // namespace

at::Tensor part_of(const at::Tensor& whole, const Shard* shard) {
  return shard == nullptr ? whole : narrow_to_box(whole, shard->box());
}

bool is_same_value(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && norm_of(a - b) <= kSame * norm_of(b);
}

SuspectValue suspect_part(const at::Tensor& found, const at::Tensor& whole, const at::Tensor& before,
                          const Shard* shard) {
  SuspectValue value{.found = found.detach().to(at::kCPU, at::kDouble),
                     .expected = part_of(whole, shard),
                     .before = before.defined() ? part_of(before, shard) : at::Tensor(),
                     .part = shard ? shard->box().text() : "whole"};
  for (int rank = 0; shard != nullptr && rank < shard->spec.mesh().size(); ++rank) {
    const Shard other{shard->spec, rank};
    if (other.box().shape == shard->box().shape && other.box().offsets != shard->box().offsets) {
      value.others.emplace_back(rank, part_of(whole, &other));
    }
  }
  return value;
}

std::string likely_cause(const SuspectValue& value, const DeviceMesh& mesh, Communicator& world, int of) {
  const bool is_here = value.found.defined();
  std::string guess;
  if (is_here) guess = own_guess(value, mesh).value_or("");
  if (is_here && guess.empty()) guess = moved_guess(value.found, value.expected, "dimension").value_or("");
  if (is_here && guess.empty() && value.found.dim() > 1) {
    guess = moved_guess(value.found.flatten(), value.expected.flatten(), "all elements, dimension").value_or("");
  }
  // What the ranks of an axis have together; they have the same part if the axis does not cut it.
  for (const auto& axis : mesh.axes()) {
    if (axis.size == 1) continue;
    const auto& ranks = mesh.communicator(axis.name);
    const std::string mine = is_here ? value.part : "nothing";
    bool alike = is_here;
    for (const std::string& other : ranks->all_gather_bytes(mine)) alike = alike && other == mine;
    // All ranks of the group decide alike: if one has nothing, all skip.
    if (!alike) continue;
    const at::Tensor sum = value.found.clone(at::MemoryFormat::Contiguous);
    ranks->all_reduce(sum);
    if (!guess.empty()) continue;
    if (is_same_value(sum, value.expected)) {
      guess = fmt::format("not summed over {}: each rank has its own addend", axis.name);
    } else if (is_same_value(sum / axis.size, value.expected)) {
      guess = fmt::format("not averaged over {}: each rank has its own", axis.name);
    }
  }
  if (is_here && guess.empty()) guess = rows_guess(value, mesh).value_or("");
  if (is_here && guess.empty()) guess = damage_guess(value.found, value.expected).value_or("");
  return world.broadcast_bytes(guess, of);
}

}  // namespace phalanx::verify
