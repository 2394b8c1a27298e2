#include "phalanx/parallel/redistribute_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <tuple>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"

namespace phalanx {
namespace {

using StepKind = RedistributeStep::Kind;

constexpr std::int64_t kCollectiveCost = 64 * 1024;  // per rank

/// A step's cost in bytes that move. An exchange packs and unpacks its data and sends a copy to each rank that needs
/// it. So its bytes count more than a gather's, and most over the whole mesh, where every rank may exchange with every
/// other.
std::int64_t cost_of(StepKind kind, bool over_mesh, std::int64_t bytes, int ranks) {
  if (kind == StepKind::slice || kind == StepKind::addend) return 1;  // one more copy here
  if (over_mesh) return bytes + bytes / 2 + 2 * kCollectiveCost * ranks;
  return bytes + (kind == StepKind::all_to_all ? bytes / 4 : 0) + kCollectiveCost * ranks;
}

/// An intermediate placement. Along each dimension, its cuts are the first `count` cuts of the source or of the target.
/// A prefix that both have in common counts as the target's. An axis that neither cuts nor is partial replicates.
struct Waypoint {
  struct Cuts {
    bool of_target = false;
    std::size_t count = 0;
    bool operator==(const Cuts&) const = default;
    bool operator<(const Cuts& other) const {
      return std::tie(of_target, count) < std::tie(other.of_target, other.count);
    }
  };
  std::vector<Cuts> cuts;     // by dimension
  std::vector<bool> partial;  // by axis
  bool operator==(const Waypoint&) const = default;
  bool operator<(const Waypoint& other) const { return std::tie(cuts, partial) < std::tie(other.cuts, other.partial); }
};

struct Way {
  Waypoint place;
  std::int64_t cost = 0;
  std::size_t previous = 0;
  StepKind kind = StepKind::slice;
  std::string axis;
  std::int64_t bytes = 0;
};

/// Finds the cheapest path among placements (Dijkstra's algorithm). Cuts of the target that are possible at once are
/// made first: they cost nothing and make the rest smaller. Only a handful of placements remain.
class RedistributeSearch {
 public:
  RedistributeSearch(const ShardSpec& from, const ShardSpec& to, RedistributePlanOptions options)
      : from_(from), to_(to), whole_mesh_(options.whole_mesh), axes_(from.mesh().axes()) {
    start_.partial.resize(axes_.size());
    goal_partial_.resize(axes_.size());
    for (std::size_t axis = 0; axis < axes_.size(); ++axis) {  // along one rank there is nothing to sum
      start_.partial[axis] = axes_[axis].size > 1 && from.is_partial(axis);
      goal_partial_[axis] = axes_[axis].size > 1 && to.is_partial(axis);
    }
    for (std::size_t d = 0; d < from.shape().size(); ++d) {
      const auto &a = from.cuts(d), &b = to.cuts(d);
      std::size_t common = 0;
      while (common < a.size() && common < b.size() && a[common].axis == b[common].axis &&
             a[common].starts == b[common].starts)
        ++common;
      start_.cuts.push_back({a.size() <= common, a.size()});
      common_.push_back(common);
    }
  }

  std::vector<RedistributeStep> steps() {
    arrive({start_, 0, 0, StepKind::slice, "", 0});
    while (!open_.empty()) {
      const std::size_t index = std::get<1>(open_.top());
      open_.pop();
      const Waypoint place = ways_[index].place;
      if (!done_.insert(place).second) continue;
      if (is_goal(place)) return steps_to(index);
      leave(index, place);
    }
    throw Error("redistribute: no way from " + from_.text() + " to " + to_.placement().text());  // cannot happen
  }

 private:
  using Entry = std::tuple<std::int64_t, std::size_t>;  // cost, then age: every rank finds the same

  const std::vector<ShardSpec::Cut>& cuts_of(const Waypoint& place, std::size_t dim) const {
    return place.cuts[dim].of_target ? to_.cuts(dim) : from_.cuts(dim);
  }

  bool is_free(const Waypoint& place, std::size_t axis) const {
    if (place.partial[axis] || axes_[axis].size == 1) return false;
    for (std::size_t d = 0; d < place.cuts.size(); ++d)
      for (std::size_t i = 0; i < place.cuts[d].count; ++i)
        if (cuts_of(place, d)[i].axis == axis) return false;
    return true;
  }

  bool is_goal(const Waypoint& place) const {
    for (std::size_t d = 0; d < place.cuts.size(); ++d)
      if (!place.cuts[d].of_target || place.cuts[d].count != to_.cuts(d).size()) return false;
    return place.partial == goal_partial_;
  }

  /// The target's next cut of the dimension, if the current cuts are a prefix of the target's.
  const ShardSpec::Cut* next_cut(const Waypoint& place, std::size_t dim) const {
    const auto& cuts = place.cuts[dim];
    return cuts.of_target && cuts.count < to_.cuts(dim).size() ? &to_.cuts(dim)[cuts.count] : nullptr;
  }

  Waypoint without_last_cut(Waypoint place, std::size_t dim) const {
    auto& cuts = place.cuts[dim];
    --cuts.count;
    cuts.of_target = cuts.of_target || cuts.count <= common_[dim];
    return place;
  }

  /// Adds all of the target's cuts that replicated axes can make.
  Waypoint cut_up(Waypoint place) const {
    for (bool changed = true; changed;) {
      changed = false;
      for (std::size_t d = 0; d < place.cuts.size(); ++d) {
        const auto* next = next_cut(place, d);
        if (next == nullptr || !is_free(place, next->axis)) continue;
        ++place.cuts[d].count;
        changed = true;
      }
    }
    return place;
  }

  ShardSpec spec_of(const Waypoint& place) const {
    if (place == start_) return from_;
    if (is_goal(place)) return to_;
    Placement placement;
    for (std::size_t d = 0; d < place.cuts.size(); ++d)
      for (std::size_t i = 0; i < place.cuts[d].count; ++i)
        placement.splits.push_back(
            (place.cuts[d].of_target ? to_ : from_).placement().splits[cuts_of(place, d)[i].split]);
    for (std::size_t axis = 0; axis < axes_.size(); ++axis)
      if (place.partial[axis]) placement.partial.push_back(axes_[axis].name);
    return from_.with(std::move(placement));
  }

  std::int64_t bytes_moved(StepKind kind, std::size_t axis, const ShardSpec& before, const ShardSpec& after) const {
    const bool reduces = kind == StepKind::reduce_scatter || kind == StepKind::all_reduce;
    std::int64_t elements = 0;
    for (int rank = 0; rank < from_.mesh().size(); ++rank) {
      const Box had = before.local_box(rank);
      if (reduces) {  // once for each group along the axis
        if (from_.mesh().coordinates_of(rank)[axis] == 0)
          elements += had.numel() * (axes_[axis].size - 1) * (kind == StepKind::all_reduce ? 2 : 1);
        continue;
      }
      const Box gets = after.local_box(rank);
      const auto kept = intersect(had, gets);
      elements += gets.numel() - (kept ? kept->numel() : 0);
    }
    return elements * static_cast<std::int64_t>(element_size(from_.dtype()));
  }

  void arrive(Way way) {
    open_.emplace(way.cost, ways_.size());
    ways_.push_back(std::move(way));
  }

  void go(std::size_t from, StepKind kind, std::optional<std::size_t> axis, Waypoint place) {
    if (done_.count(place) > 0) return;
    const bool local = kind == StepKind::slice || kind == StepKind::addend;
    const std::int64_t bytes =
        local ? 0 : bytes_moved(kind, axis.value_or(0), spec_of(ways_[from].place), spec_of(place));
    const std::int64_t cost = ways_[from].cost + cost_of(kind, !axis, bytes, from_.mesh().size());
    arrive({std::move(place), cost, from, kind, axis && !local ? axes_[*axis].name : std::string(), bytes});
  }

  void leave(std::size_t index, const Waypoint& place) {
    if (Waypoint cut = cut_up(place); cut != place) return go(index, StepKind::slice, std::nullopt, std::move(cut));

    bool sums_pending = false;
    for (std::size_t axis = 0; axis < axes_.size(); ++axis) {
      Waypoint next = place;
      next.partial[axis] = !place.partial[axis];
      if (place.partial[axis] && !goal_partial_[axis]) {
        sums_pending = true;
        for (std::size_t d = 0; d < place.cuts.size(); ++d) {
          const auto* cut = next_cut(place, d);
          if (cut == nullptr || cut->axis != axis) continue;
          Waypoint scattered = next;
          ++scattered.cuts[d].count;
          go(index, StepKind::reduce_scatter, axis, std::move(scattered));
        }
        go(index, StepKind::all_reduce, axis, std::move(next));
      } else if (goal_partial_[axis] && is_free(place, axis)) {
        go(index, StepKind::addend, axis, std::move(next));
      }
    }

    std::size_t cut_axes = 0;
    for (std::size_t d = 0; d < place.cuts.size(); ++d) {
      cut_axes += place.cuts[d].count;
      if (place.cuts[d].of_target || place.cuts[d].count == 0) continue;  // the current cuts may stay
      const std::size_t axis = cuts_of(place, d)[place.cuts[d].count - 1].axis;
      const Waypoint gathered = without_last_cut(place, d);
      if (goal_partial_[axis]) {
        Waypoint padded = gathered;
        padded.partial[axis] = true;
        go(index, StepKind::addend, axis, std::move(padded));
      }
      Waypoint exchanged = cut_up(gathered);
      const bool is_gather = exchanged == gathered;
      go(index, is_gather ? StepKind::all_gather : StepKind::all_to_all, axis, std::move(exchanged));
    }
    // Over the whole mesh everything can change at once, except addends: they stay on their ranks.
    if (whole_mesh_ && !sums_pending && cut_axes > 1) {
      Waypoint exchanged = place;
      for (std::size_t d = 0; d < place.cuts.size(); ++d) exchanged.cuts[d] = {true, to_.cuts(d).size()};
      if (exchanged != place) go(index, StepKind::all_to_all, std::nullopt, std::move(exchanged));
    }
  }

  std::vector<RedistributeStep> steps_to(std::size_t index) const {
    std::vector<RedistributeStep> steps;
    for (; index != 0; index = ways_[index].previous) {
      const Way& way = ways_[index];
      steps.push_back({way.kind, way.axis, spec_of(ways_[way.previous].place), spec_of(way.place), way.bytes});
    }
    std::reverse(steps.begin(), steps.end());
    return steps;
  }

  const ShardSpec& from_;
  const ShardSpec& to_;
  bool whole_mesh_;
  const std::vector<MeshAxis>& axes_;
  Waypoint start_;
  std::vector<bool> goal_partial_;
  std::vector<std::size_t> common_;  // by dimension: length of the common prefix of source and target cuts
  std::vector<Way> ways_;
  std::set<Waypoint> done_;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open_;
};

}  // namespace

RedistributePlan plan_redistribute(const ShardSpec& from, const ShardSpec& to, RedistributePlanOptions options) {
  if (from.shape() != to.shape() || from.dtype() != to.dtype() || from.mesh() != to.mesh())
    throw ConfigError(
        fmt::format("redistribute: {} and {} differ in shape, dtype or mesh: only the placement may change",
                    from.text(), to.text()));
  RedistributePlan plan{from, to, {}};
  if (from.same_layout(to)) return plan;
  if (from.numel() == 0)
    plan.steps.push_back({StepKind::slice, "", from, to, 0});  // nothing to move, but other shapes
  else
    plan.steps = RedistributeSearch(from, to, options).steps();
  return plan;
}

std::string_view name_of(RedistributeStep::Kind kind) {
  switch (kind) {
    case StepKind::slice:
      return "slice";
    case StepKind::addend:
      return "addend";
    case StepKind::all_gather:
      return "all_gather";
    case StepKind::reduce_scatter:
      return "reduce_scatter";
    case StepKind::all_reduce:
      return "all_reduce";
    case StepKind::all_to_all:
      return "all_to_all";
  }
  return "unknown";
}

std::string RedistributeStep::text() const {
  const bool local = kind == StepKind::slice || kind == StepKind::addend;
  std::string text(name_of(kind));
  if (!local) text += axis.empty() ? " over the mesh" : " over " + axis;
  text += fmt::format(": {} -> {}", before.placement().text(), after.placement().text());
  return local ? text : text + ", " + human_bytes(bytes);
}

std::int64_t RedistributePlan::bytes() const {
  std::int64_t sum = 0;
  for (const auto& step : steps) sum += step.bytes;
  return sum;
}

std::string RedistributePlan::text() const {
  std::string text = fmt::format("{} -> {}: ", from.text(), to.placement().text());
  if (steps.empty()) return text + "nothing to do\n";
  text += human_bytes(bytes()) + " over all ranks\n";
  for (std::size_t i = 0; i < steps.size(); ++i) text += fmt::format("  {}. {}\n", i + 1, steps[i].text());
  return text;
}

}  // namespace phalanx
