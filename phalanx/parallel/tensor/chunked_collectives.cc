#include "phalanx/parallel/tensor/chunked_collectives.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <functional>
#include <numeric>

#include "phalanx/base/error.h"
#include "phalanx/comm/communicator.h"

namespace phalanx {
namespace {

std::int64_t product_of(at::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

std::size_t row_dimension(at::IntArrayRef sizes, std::int64_t dim) {
  const auto dims = static_cast<std::int64_t>(sizes.size());
  const std::int64_t found = dim < 0 ? dim + dims : dim;
  if (found < 0 || found >= dims - 1) {
    throw Error(
        fmt::format("rows of a tensor [{}] cannot be split along dimension {}: expected one before the last, 0 to {}",
                    fmt::join(sizes, ", "), dim, dims - 2));
  }
  return static_cast<std::size_t>(found);
}

}  // namespace

RowLayout RowLayout::of_part(at::IntArrayRef sizes, std::int64_t dim, const Communicator& comm) {
  const std::size_t at = row_dimension(sizes, dim);
  RowLayout layout;
  layout.outer = product_of(sizes.slice(0, at));
  layout.ranks = comm.size();
  layout.inner = product_of(sizes.slice(at, sizes.size() - 1 - at));
  layout.width = sizes.back();
  layout.part = layout.whole = sizes.vec();
  layout.whole[at] *= comm.size();
  return layout;
}

RowLayout RowLayout::of_whole(at::IntArrayRef sizes, std::int64_t dim, const Communicator& comm) {
  const std::size_t at = row_dimension(sizes, dim);
  std::vector<std::int64_t> part = sizes.vec();
  if (part[at] % comm.size() != 0) {
    throw Error(fmt::format("dimension {} of [{}] cannot be split over the {} ranks of '{}': {} % {} = {}, expected 0",
                            at, fmt::join(sizes, ", "), comm.size(), comm.name(), part[at], comm.size(),
                            part[at] % comm.size()));
  }
  part[at] /= comm.size();
  return of_part(part, static_cast<std::int64_t>(at), comm);
}

RowLayout RowLayout::of_width(std::int64_t features) const {
  RowLayout layout = *this;
  layout.width = layout.part.back() = layout.whole.back() = features;
  return layout;
}

ChunkedAllGather::ChunkedAllGather(const at::Tensor& part_in, std::int64_t dim, Communicator& comm)
    : layout_(RowLayout::of_part(part_in.sizes(), dim, comm)),
      rows_(at::empty({layout_.rows(), layout_.width}, part_in.options().requires_grad(false))) {
  const at::Tensor part = part_in.detach().contiguous().view({-1, layout_.width});
  const std::int64_t block = layout_.ranks * layout_.inner;
  if (layout_.outer > 1) {
    for (std::int64_t o = 0; o < layout_.outer; ++o) {
      works_.push_back(comm.all_gather(rows_.narrow(0, o * block, block),
                                       part.narrow(0, o * layout_.inner, layout_.inner), {.async = true}));
      chunks_.push_back({o * block, block, static_cast<int>(o)});
    }
    return;
  }
  const std::int64_t first = comm.rank() * layout_.inner, end = first + layout_.inner;
  const at::Tensor own = rows_.narrow(0, first, layout_.inner);
  own.copy_(part);
  const Work others = comm.all_gather(rows_, own, {.async = true});
  const auto add = [&](std::int64_t from, std::int64_t to, const Work& work) {
    if (from == to) return;
    chunks_.push_back({from, to - from, static_cast<int>(chunks_.size())});
    works_.push_back(work);
  };
  add(first, end, Work());
  add(0, first, others);
  add(end, block, others);
}

at::Tensor ChunkedAllGather::wait(const RowChunk& chunk) const {
  works_[static_cast<std::size_t>(chunk.number)].wait();
  return rows_.narrow(0, chunk.first, chunk.count);
}

ChunkedReduceScatter::ChunkedReduceScatter(const RowLayout& layout, const at::TensorOptions& options,
                                           Communicator& comm)
    : layout_(layout), comm_(comm), rows_(at::empty({layout.rows(), layout.width}, options)) {
  if (layout.outer > 1) {
    const std::int64_t block = layout.ranks * layout.inner;
    part_ = at::empty({layout.outer * layout.inner, layout.width}, options);
    for (std::int64_t o = 0; o < layout.outer; ++o) chunks_.push_back({o * block, block, static_cast<int>(o)});
    return;
  }
  const std::int64_t first = comm.rank() * layout.inner, end = first + layout.inner;
  const auto add = [&](std::int64_t from, std::int64_t to) {
    if (from < to || layout.inner == 0) chunks_.push_back({from, to - from, static_cast<int>(chunks_.size())});
  };
  add(end, layout.rows());
  add(0, first);
  add(first, end);  // its own rows come last
}

void ChunkedReduceScatter::send(const RowChunk& chunk) {
  if (layout_.outer > 1) {
    works_.push_back(comm_.reduce_scatter(part_.narrow(0, chunk.number * layout_.inner, layout_.inner), buffer(chunk),
                                          {.async = true}));
  } else if (comm_.size() > 1 && chunk.number + 2 == static_cast<int>(chunks_.size())) {
    exchange_rows();
  }
}

void ChunkedReduceScatter::exchange_rows() {
  std::vector<Communicator::P2POp> operations;
  received_.resize(static_cast<std::size_t>(comm_.size()));
  for (int k = 1; k < comm_.size(); ++k) {
    const int to = (comm_.rank() + k) % comm_.size(), from = (comm_.rank() + comm_.size() - k) % comm_.size();
    at::Tensor& buffer = received_[static_cast<std::size_t>(from)];
    buffer = at::empty({layout_.inner, layout_.width}, rows_.options());
    operations.push_back({.is_send = true, .tensor = rows_.narrow(0, to * layout_.inner, layout_.inner), .peer = to});
    operations.push_back({.is_send = false, .tensor = buffer, .peer = from});
  }
  works_.push_back(comm_.batch_isend_irecv(std::move(operations), {.async = true}));
}

at::Tensor ChunkedReduceScatter::sum_of_received() const {
  const auto addend = [&](int rank) {
    return rank == comm_.rank() ? rows_.narrow(0, rank * layout_.inner, layout_.inner)
                                : received_[static_cast<std::size_t>(rank)];
  };
  if (comm_.size() == 1) return rows_;
  if (comm_.size() == 2) return at::add(addend(0), addend(1));  // one rounding either way
  const bool is_short = rows_.element_size() < 4;
  at::Tensor sum = is_short ? addend(0).to(at::kFloat).add_(addend(1)) : at::add(addend(0), addend(1));
  for (int rank = 2; rank < comm_.size(); ++rank) sum.add_(addend(rank));
  return sum.to(rows_.scalar_type());
}

at::Tensor ChunkedReduceScatter::finish() {
  for (const Work& work : works_) work.wait();
  return (layout_.outer > 1 ? part_ : sum_of_received()).view(layout_.part);
}

}  // namespace phalanx
