#include "phalanx/parallel/tensor/functional_collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx {
namespace {

enum class Move { copy, sum, gather, part, all_gather, reduce_scatter };

Move mirrored(Move move) {
  switch (move) {
    case Move::copy:
      return Move::sum;
    case Move::sum:
      return Move::copy;
    case Move::gather:
      return Move::part;
    case Move::part:
      return Move::gather;
    case Move::all_gather:
      return Move::reduce_scatter;
    case Move::reduce_scatter:
      return Move::all_gather;
  }
  throw Error("collective functions: unknown function");
}

struct Group : torch::CustomClassHolder {
  Group(Move move, std::int64_t dim, std::shared_ptr<Communicator> comm, OverlapQueue overlap_queue)
      : move(move), dim(dim), comm(std::move(comm)), overlap_queue(std::move(overlap_queue)) {}
  Move move;
  std::int64_t dim;  // not negative
  std::shared_ptr<Communicator> comm;
  OverlapQueue overlap_queue;
};

std::vector<std::int64_t> with_extent(const at::Tensor& x, std::int64_t dim, std::int64_t extent) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = extent;
  return sizes;
}

// Concatenates the parts of all ranks along the dimension.
at::Tensor gathered(const at::Tensor& x, std::int64_t dim, Communicator& comm) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.insert(sizes.begin(), comm.size());
  const at::Tensor parts = at::empty(sizes, x.options());
  comm.all_gather(parts, x.contiguous());
  // [ranks, a, part, b] -> [a, ranks, part, b] -> [a, ranks * part, b]: no copy if `dim` is the first dimension.
  return parts.movedim(0, dim).reshape(with_extent(x, dim, comm.size() * x.size(dim)));
}

struct InFlight {
  at::Tensor result;
  Work work;
};

InFlight start_sum(const at::Tensor& x, Communicator& comm, bool async) {
  const at::Tensor sum = x.clone(at::MemoryFormat::Contiguous);
  return {sum, comm.all_reduce(sum, {.async = async})};
}

// This rank's part of the sum.
InFlight start_reduced_part(const at::Tensor& x, std::int64_t dim, Communicator& comm, bool async) {
  const std::int64_t extent = x.size(dim) / comm.size();
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = extent;
  const at::Tensor part = at::empty(sizes, x.options());
  sizes.insert(sizes.begin() + dim, comm.size());
  return {part, comm.reduce_scatter(part, x.contiguous().view(sizes).movedim(dim, 0).contiguous(), {.async = async})};
}

at::Tensor moved(const at::Tensor& x, const Group& group) {
  Communicator& comm = *group.comm;
  switch (group.move) {
    case Move::copy:
      return x;
    case Move::sum:
      return start_sum(x, comm, false).result;
    case Move::gather:
    case Move::all_gather:
      return gathered(x, group.dim, comm);
    case Move::part: {
      const std::int64_t extent = x.size(group.dim) / comm.size();
      return x.narrow(group.dim, comm.rank() * extent, extent).clone(at::MemoryFormat::Contiguous);
    }
    case Move::reduce_scatter:
      return start_reduced_part(x, group.dim, comm, false).result;
  }
  throw Error("collective functions: unknown function");
}

at::Tensor run(const at::Tensor& x, Move move, std::int64_t dim, const std::shared_ptr<Communicator>& comm,
               const OverlapQueue& overlap_queue = nullptr);

struct MoveFunction : torch::autograd::Function<MoveFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const c10::intrusive_ptr<Group>& group) {
    ctx->saved_data["group"] = c10::IValue::make_capsule(group);
    return moved(x, *group);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto capsule = ctx->saved_data["group"].toCapsule();
    const auto& group = static_cast<const Group&>(*capsule);
    if (group.overlap_queue && !at::GradMode::is_enabled()) {
      const bool sums = group.move == Move::copy;
      InFlight in_flight =
          sums ? start_sum(grads[0], *group.comm, true) : start_reduced_part(grads[0], group.dim, *group.comm, true);
      group.overlap_queue->flush({});
      in_flight.work.wait();
      return {in_flight.result, at::Tensor()};
    }
    return {run(grads[0], mirrored(group.move), group.dim, group.comm), at::Tensor()};
  }
};

at::Tensor run(const at::Tensor& x, Move move, std::int64_t dim, const std::shared_ptr<Communicator>& comm,
               const OverlapQueue& overlap_queue) {
  if (comm->size() == 1) return x;
  const bool has_dim = move != Move::copy && move != Move::sum;
  if (has_dim && dim < 0) dim += x.dim();
  if (has_dim && (dim < 0 || dim >= x.dim())) {
    throw Error(fmt::format("collective functions: a tensor [{}] has no such dimension", fmt::join(x.sizes(), ", ")));
  }
  if ((move == Move::part || move == Move::reduce_scatter) && x.size(dim) % comm->size() != 0) {
    throw Error(
        fmt::format("dimension {} of [{}] cannot be split over the {} ranks of '{}': {} % {} = {}; expected a multiple "
                    "of {}, for example {} or {}",
                    dim, fmt::join(x.sizes(), ", "), comm->size(), comm->name(), x.size(dim), comm->size(),
                    x.size(dim) % comm->size(), comm->size(), x.size(dim) / comm->size() * comm->size(),
                    (x.size(dim) / comm->size() + 1) * comm->size()));
  }
  auto group = c10::make_intrusive<Group>(move, dim, comm, overlap_queue);
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return moved(x, *group);
  return MoveFunction::apply(x, group);
}

struct RowCounts : torch::CustomClassHolder {
  RowCounts(std::vector<std::int64_t> sent, std::vector<std::int64_t> received, std::shared_ptr<Communicator> comm)
      : sent(std::move(sent)), received(std::move(received)), comm(std::move(comm)) {}
  std::vector<std::int64_t> sent, received;  // rows
  std::shared_ptr<Communicator> comm;
};

std::vector<std::int64_t> times(std::vector<std::int64_t> counts, std::int64_t factor) {
  for (std::int64_t& count : counts) count *= factor;
  return counts;
}

at::Tensor exchanged_rows(const at::Tensor& x, const RowCounts& rows) {
  const std::int64_t all = std::accumulate(rows.received.begin(), rows.received.end(), std::int64_t{0});
  at::Tensor result = at::empty(with_extent(x, 0, all), x.options());
  const std::int64_t elements = c10::multiply_integers(x.sizes().slice(1));  // of a row
  rows.comm->all_to_all_uneven(result, x.contiguous(), times(rows.received, elements), times(rows.sent, elements));
  return result;
}

struct ExchangeRowsFunction : torch::autograd::Function<ExchangeRowsFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const c10::intrusive_ptr<RowCounts>& rows) {
    ctx->saved_data["rows"] = c10::IValue::make_capsule(rows);
    return exchanged_rows(x, *rows);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto capsule = ctx->saved_data["rows"].toCapsule();
    const auto& rows = static_cast<const RowCounts&>(*capsule);
    return {all_to_all_rows(grads[0], rows.received, rows.sent, rows.comm), at::Tensor()};
  }
};

}  // namespace

at::Tensor all_to_all_rows(const at::Tensor& x, const std::vector<std::int64_t>& sent,
                           const std::vector<std::int64_t>& received, const std::shared_ptr<Communicator>& group) {
  const std::int64_t rows = std::accumulate(sent.begin(), sent.end(), std::int64_t{0});
  if (x.dim() == 0 || x.size(0) != rows) {
    throw Error(
        fmt::format("all_to_all_rows: [{}] has not the {} rows that are to be sent", fmt::join(x.sizes(), ", "), rows));
  }
  if (group->size() == 1) return x;
  auto counts = c10::make_intrusive<RowCounts>(sent, received, group);
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return exchanged_rows(x, *counts);
  return ExchangeRowsFunction::apply(x, counts);
}

at::Tensor copy_to_group(const at::Tensor& x, const std::shared_ptr<Communicator>& group,
                         const OverlapQueue& overlap_queue) {
  return run(x, Move::copy, 0, group, overlap_queue);
}
at::Tensor reduce_from_group(const at::Tensor& x, const std::shared_ptr<Communicator>& group) {
  return run(x, Move::sum, 0, group);
}
at::Tensor gather_from_group(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group) {
  return run(x, Move::gather, dim, group);
}
at::Tensor scatter_to_group(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group) {
  return run(x, Move::part, dim, group);
}
at::Tensor all_gather_along(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group,
                            const OverlapQueue& overlap_queue) {
  return run(x, Move::all_gather, dim, group, overlap_queue);
}
at::Tensor reduce_scatter_along(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group) {
  return run(x, Move::reduce_scatter, dim, group);
}

}  // namespace phalanx
