#include "phalanx/layout/flat_layout.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

namespace phalanx::fsdp {
namespace {

constexpr std::int64_t kGranule = 16;            // elements: parameters and shards begin at cache lines where possible
constexpr std::int64_t kFineCandidates = 20000;  // shard sizes that are tried in steps of one granule

std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

bool fits_at(const FlatParameter& parameter, std::int64_t offset, std::int64_t shard) {
  const std::int64_t first = (offset / shard + 1) * shard, end = offset + parameter.numel();
  if (first >= end) return true;
  if ((first - offset) % parameter.row_elements != 0) return false;
  return first + shard >= end || shard % parameter.row_elements == 0;
}

/// The first offset from `start` on at which no shard boundary is inside a row.
std::optional<std::int64_t> place(const FlatParameter& parameter, std::int64_t start, std::int64_t shard) {
  const std::int64_t boundary = (start / shard + 1) * shard;
  const std::int64_t shifted = start + (boundary - start) % parameter.row_elements;  // whole rows before the boundary
  for (const std::int64_t offset : {start, shifted, boundary}) {
    if (fits_at(parameter, offset, shard)) return offset;
  }
  return std::nullopt;
}

std::optional<std::vector<std::int64_t>> place_all(const std::vector<FlatParameter>& parameters,
                                                   const std::vector<std::size_t>& order, std::int64_t shard, int ranks,
                                                   std::int64_t alignment) {
  std::vector<std::int64_t> offsets(parameters.size(), 0);
  std::int64_t cursor = 0;
  for (const std::size_t i : order) {
    if (parameters[i].numel() == 0) continue;
    const auto offset = place(parameters[i], round_up(cursor, alignment), shard);
    if (!offset || *offset + parameters[i].numel() > shard * ranks) return std::nullopt;
    offsets[i] = *offset;
    cursor = *offset + parameters[i].numel();
  }
  return offsets;
}

/// The orders to try: first with rows of one length together, so that weights that are multiplied with one input are
/// adjacent, as one product needs them (kernels/fused_linear.h); then as given, and with the rows that are hard to
/// place first.
std::vector<std::vector<std::size_t>> orders_of(const std::vector<FlatParameter>& parameters) {
  std::vector<std::size_t> given(parameters.size());
  std::iota(given.begin(), given.end(), 0);
  std::vector<std::vector<std::size_t>> orders;
  const auto add = [&](const auto& before) {
    auto order = given;
    std::ranges::stable_sort(order, before);
    if (std::ranges::find(orders, order) == orders.end()) orders.push_back(std::move(order));
  };
  const auto row = [&](std::size_t i) { return parameters[i].row_elements; };
  const auto all = [&](std::size_t i) { return parameters[i].numel(); };
  add([&](std::size_t a, std::size_t b) { return row(a) < row(b); });
  add([](std::size_t a, std::size_t b) { return a < b; });
  add([&](std::size_t a, std::size_t b) { return row(a) > row(b); });
  add([&](std::size_t a, std::size_t b) { return all(a) > all(b); });
  return orders;
}

/// Shard sizes in ascending order: first in fine steps, then in wider ones, up to a size at which all parameters fit
/// into the first shard.
class Candidates {
 public:
  Candidates(std::int64_t smallest, std::int64_t largest) : next_(smallest), largest_(largest) {}
  bool more() const { return next_ <= largest_; }
  std::int64_t take() {
    const std::int64_t result = next_;
    if (next_ == largest_) {
      ++next_;
      return result;
    }
    const std::int64_t step = ++taken_ < kFineCandidates ? kGranule : round_up(next_ / 128 + 1, kGranule);
    next_ = std::min(next_ + step, largest_);
    return result;
  }

 private:
  std::int64_t next_, largest_, taken_ = 0;
};

}  // namespace

std::int64_t FlatLayout::padding() const noexcept {
  std::int64_t used = 0;
  for (const auto& parameter : parameters) used += parameter.numel();
  return flat_elements() - used;
}

RowRange FlatLayout::rows_of(std::size_t parameter, int rank) const noexcept {
  const auto& p = parameters[parameter];
  const auto row_at = [&](std::int64_t element) {
    return std::clamp<std::int64_t>(element - offsets[parameter], 0, p.numel()) / p.row_elements;
  };
  return {row_at(rank * shard_elements), row_at((rank + 1) * shard_elements)};
}

FlatLayout lay_out_flat(const std::vector<FlatParameter>& parameters, int ranks) {
  std::int64_t total = 0, with_gaps = 0, rows_together = 1;
  for (const auto& p : parameters) {
    total += p.numel();
    with_gaps += round_up(p.numel(), kGranule);
  }
  FlatLayout layout{.ranks = ranks, .parameters = parameters, .offsets = std::vector<std::int64_t>(parameters.size())};
  if (total == 0) return layout;
  const std::int64_t smallest = round_up((total + ranks - 1) / ranks, kGranule);
  const auto orders = orders_of(parameters);
  const auto try_size = [&](std::int64_t shard) {
    for (const std::int64_t alignment : {kGranule, std::int64_t{1}}) {
      for (const auto& order : orders) {
        if (auto offsets = place_all(parameters, order, shard, ranks, alignment)) {
          layout.shard_elements = shard;
          layout.offsets = *std::move(offsets);
          return true;
        }
      }
    }
    return false;
  };
  // A shard size that is a multiple of all long rows can be cut anywhere. It bounds the search.
  for (const auto& p : parameters) {
    if (p.numel() > smallest) rows_together = std::lcm(rows_together, p.row_elements);
    if (rows_together > smallest) break;
  }
  const std::int64_t common =
      rows_together > smallest ? with_gaps : round_up(smallest, std::lcm(rows_together, kGranule));
  bool has_tried_common = false;
  for (Candidates sizes(smallest, std::max(smallest, round_up(with_gaps, kGranule))); sizes.more();) {
    const std::int64_t shard = sizes.take();
    if (shard >= common && !std::exchange(has_tried_common, true) && try_size(common)) break;
    if (try_size(shard)) break;
  }
  return layout;
}

}  // namespace phalanx::fsdp
