#include "phalanx/parallel/redistribute.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/data_type.h"
#include "phalanx/tensor/narrow_to_box.h"

namespace phalanx {
namespace {

using Counts = std::vector<std::int64_t>;

at::Tensor new_tensor(const at::Tensor& like, at::IntArrayRef shape) {
  return at::empty(shape, at::TensorOptions(like.scalar_type()).device(like.device()));
}

Counts counts_of(const std::vector<Box>& boxes) {
  Counts counts;
  for (const auto& box : boxes) counts.push_back(box.numel());
  return counts;
}

std::int64_t sum_of(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }

/// Whether the part's elements are contiguous in the row-major whole.
bool lies_flat(const Box& part, const Box& whole) {
  if (part.empty()) return true;
  bool outside = false;  // outside the innermost dimension that is cut
  for (std::size_t d = part.shape.size(); d-- > 0;) {
    if (outside && part.shape[d] != 1) return false;
    outside = outside || part.shape[d] != whole.shape[d];
  }
  return true;
}

bool lie_flat(const std::vector<Box>& parts, const Box& whole) {
  return std::all_of(parts.begin(), parts.end(), [&](const Box& part) { return lies_flat(part, whole); });
}

/// One rank's part in the steps of a plan.
class RedistributeRun {
 public:
  explicit RedistributeRun(const DeviceMesh& mesh)
      : mesh_(mesh), shape_(mesh.shape()), rank_(mesh.rank()), own_(shape_.coordinates_of(rank_)) {}

  at::Tensor operator()(const RedistributeStep& step, const at::Tensor& local) const {
    const Box had = step.before.local_box(rank_), gets = step.after.local_box(rank_);
    switch (step.kind) {
      case RedistributeStep::Kind::slice: {
        at::Tensor result = new_tensor(local, gets.shape);
        if (!gets.empty()) result.copy_(view_of(local, had, gets));
        return result;
      }
      case RedistributeStep::Kind::addend:
        return addend(step, local, had, gets);
      case RedistributeStep::Kind::all_gather:
        return all_gather(step, local, had, gets);
      case RedistributeStep::Kind::reduce_scatter:
        return reduce_scatter(step, local, had, gets);
      case RedistributeStep::Kind::all_reduce: {
        at::Tensor result = new_tensor(local, gets.shape).copy_(local);
        if (result.numel() > 0) mesh_.communicator(step.axis)->all_reduce(result);
        return result;
      }
      case RedistributeStep::Kind::all_to_all:
        return all_to_all(step, local, had, gets);
    }
    throw Error("redistribute: a step of no known kind");
  }

 private:
  /// The ranks of a step's communicator, in its order: along one axis, or all.
  std::vector<int> members_of(const RedistributeStep& step) const {
    std::vector<int> members;
    if (step.axis.empty()) {
      members.resize(static_cast<std::size_t>(shape_.size()));
      std::iota(members.begin(), members.end(), 0);
      return members;
    }
    const std::size_t axis = shape_.index_of(step.axis);
    std::vector<int> coordinates = own_;
    for (int i = 0; i < shape_.axes()[axis].size; ++i) {
      coordinates[axis] = i;
      members.push_back(shape_.rank_of(coordinates));
    }
    return members;
  }

  static std::vector<Box> boxes_of(const ShardSpec& spec, const std::vector<int>& ranks) {
    std::vector<Box> boxes;
    for (const int rank : ranks) boxes.push_back(spec.local_box(rank));
    return boxes;
  }

  /// Of the ranks that hold the same value, only the first keeps it. A rank that is the only holder of a part keeps it.
  at::Tensor addend(const RedistributeStep& step, const at::Tensor& local, const Box& had, const Box& gets) const {
    at::Tensor result = at::zeros(gets.shape, at::TensorOptions(local.scalar_type()).device(local.device()));
    for (std::size_t axis = 0; axis < own_.size(); ++axis) {
      const bool new_addend = step.after.is_partial(axis) && !step.before.is_partial(axis);
      if (new_addend && !is_cut(step.before, axis) && own_[axis] != 0) return result;
    }
    if (!had.empty()) view_of(result, gets, had).copy_(local);
    return result;
  }

  static bool is_cut(const ShardSpec& spec, std::size_t axis) {
    for (std::size_t d = 0; d < spec.shape().size(); ++d)
      for (const auto& cut : spec.cuts(d))
        if (cut.axis == axis) return true;
    return false;
  }

  at::Tensor all_gather(const RedistributeStep& step, const at::Tensor& local, const Box& had, const Box& gets) const {
    at::Tensor result = new_tensor(local, gets.shape);
    if (gets.empty()) return result;
    const std::vector<Box> parts = boxes_of(step.before, members_of(step));
    const Counts counts = counts_of(parts);
    const bool flat = lie_flat(parts, gets);
    const at::Tensor gathered = flat ? result.view({-1}) : new_tensor(local, {gets.numel()});
    const at::Tensor input = local.contiguous().view({-1});
    const auto& comm = mesh_.communicator(step.axis);
    if (std::all_of(counts.begin(), counts.end(), [&](std::int64_t count) { return count == had.numel(); }))
      comm->all_gather(gathered, input);
    else
      comm->all_gather_uneven(gathered, input, counts);
    if (!flat) unpack(gathered, parts, result, gets);
    return result;
  }

  at::Tensor reduce_scatter(const RedistributeStep& step, const at::Tensor& local, const Box& had,
                            const Box& gets) const {
    at::Tensor result = new_tensor(local, gets.shape);
    if (had.empty()) return result;
    const std::vector<Box> parts = boxes_of(step.after, members_of(step));
    const Counts counts = counts_of(parts);
    const at::Tensor input = lie_flat(parts, had) ? local.contiguous().view({-1}) : pack(local, had, parts);
    const auto& comm = mesh_.communicator(step.axis);
    if (std::all_of(counts.begin(), counts.end(), [&](std::int64_t count) { return count == gets.numel(); }))
      comm->reduce_scatter(result.view({-1}), input);
    else
      comm->reduce_scatter_uneven(result.view({-1}), input, counts);
    return result;
  }

  /// Every rank has one source for each element: the holder with the receiver's coordinates along all axes that do not
  /// cut. So the load is spread over the ranks that hold the same, and addends stay apart.
  at::Tensor all_to_all(const RedistributeStep& step, const at::Tensor& local, const Box& had, const Box& gets) const {
    const std::vector<int> members = members_of(step);
    std::vector<Box> sent, received;
    for (const int member : members) {
      const bool exchanges = member != rank_ && stands_alike(step.before, member);
      const auto for_them = exchanges ? intersect(had, step.after.local_box(member)) : std::nullopt;
      const auto from_them = exchanges ? intersect(step.before.local_box(member), gets) : std::nullopt;
      const Box nothing{had.offsets, Counts(had.shape.size(), 0)};
      sent.push_back(for_them.value_or(nothing));
      received.push_back(from_them.value_or(nothing));
    }
    const Counts output_counts = counts_of(received);
    const at::Tensor inbox = new_tensor(local, {sum_of(output_counts)});
    const auto& comm = step.axis.empty() ? mesh_.world() : mesh_.communicator(step.axis);
    comm->all_to_all_uneven(inbox, pack(local, had, sent), output_counts, counts_of(sent));

    at::Tensor result = new_tensor(local, gets.shape);
    unpack(inbox, received, result, gets);
    if (const auto kept = intersect(had, gets)) view_of(result, gets, *kept).copy_(view_of(local, had, *kept));
    return result;
  }

  bool stands_alike(const ShardSpec& before, int other) const {
    const std::vector<int> coordinates = shape_.coordinates_of(other);
    for (std::size_t axis = 0; axis < coordinates.size(); ++axis)
      if (coordinates[axis] != own_[axis] && !is_cut(before, axis)) return false;
    return true;
  }

  /// Concatenates the parts, each row-major.
  static at::Tensor pack(const at::Tensor& local, const Box& held, const std::vector<Box>& parts) {
    at::Tensor packed = new_tensor(local, {sum_of(counts_of(parts))});
    std::int64_t at = 0;
    for (const auto& part : parts) {
      if (part.empty()) continue;
      packed.narrow(0, at, part.numel()).view(part.shape).copy_(view_of(local, held, part));
      at += part.numel();
    }
    return packed;
  }

  static void unpack(const at::Tensor& packed, const std::vector<Box>& parts, const at::Tensor& result,
                     const Box& held) {
    std::int64_t at = 0;
    for (const auto& part : parts) {
      if (part.empty()) continue;
      view_of(result, held, part).copy_(packed.narrow(0, at, part.numel()).view(part.shape));
      at += part.numel();
    }
  }

  const DeviceMesh& mesh_;
  const MeshShape shape_;
  const int rank_;
  const std::vector<int> own_;  // coordinates
};

}  // namespace

at::Tensor view_of(const at::Tensor& local, const Box& held, const Box& part) {
  return narrow_to_box(local, relative_to(part, held));
}

RedistributePlan plan_redistribute(const ShardSpec& from, const ShardSpec& to, const DeviceMesh& mesh) {
  return plan_redistribute(from, to, RedistributePlanOptions{.whole_mesh = mesh.size() == mesh.world()->size()});
}

std::string explain_redistribute(const ShardSpec& from, const ShardSpec& to, const DeviceMesh& mesh) {
  return plan_redistribute(from, to, mesh).text();
}

at::Tensor redistribute(const at::Tensor& local, const ShardSpec& from, const ShardSpec& to, const DeviceMesh& mesh) {
  return redistribute(local, plan_redistribute(from, to, mesh), mesh);
}

at::Tensor redistribute(const at::Tensor& local, const RedistributePlan& plan, const DeviceMesh& mesh) {
  const ShardSpec& from = plan.from;
  if (from.mesh() != mesh.shape())
    throw ConfigError(fmt::format("redistribute: {} is not on {}", from.text(), mesh.text()));
  const Box held = from.local_box(mesh.rank());
  if (local.sizes() != at::IntArrayRef(held.shape) || local.scalar_type() != scalar_type_of(from.dtype()))
    throw Error(
        fmt::format("redistribute: of {} rank {} holds {}: expected a {} tensor of shape [{}], found {} of [{}]",
                    from.text(), mesh.rank(), held.text(), name_of(from.dtype()), fmt::join(held.shape, ", "),
                    c10::toString(local.scalar_type()), fmt::join(local.sizes(), ", ")));
  const c10::NoGradGuard no_grad;
  const RedistributeRun run(mesh);
  at::Tensor tensor = local;
  for (const auto& step : plan.steps) tensor = run(step, tensor);
  return tensor;
}

}  // namespace phalanx
