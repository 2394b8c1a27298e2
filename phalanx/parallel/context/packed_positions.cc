#include "phalanx/parallel/context/packed_positions.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/layout/packed_cut.h"

namespace phalanx {

PackedPositions::PackedPositions(const ContextCut& cut, const DocumentBoundaries& documents)
    : rows_(documents.rows()), seq_(documents.seq_len()) {
  if (cut.padded(seq_) != seq_) {
    throw Error(fmt::format("packed positions: rows of {} tokens over {} ranks; expected rows that are padded to {}",
                            seq_, cut.ranks, cut.padded(seq_)));
  }
  const at::Device device = documents.positions().device();
  const auto on_host = at::TensorOptions(at::kLong).pinned_memory(!device.is_cpu());
  const std::int64_t local = cut.local(seq_);
  const at::Tensor own = at::empty({rows_, local}, on_host), places = at::empty({2, rows_ * seq_}, on_host);
  auto* const mine = own.mutable_data_ptr<std::int64_t>();
  auto* const place = places.mutable_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < rows_; ++row) {
    const auto by_rank = packed_ranges(cut, documents.of_row(row));
    for (std::int64_t rank = 0; rank < cut.ranks; ++rank) {
      std::int64_t slot = 0;
      for (const auto& [first, count] : by_rank[static_cast<std::size_t>(rank)]) {
        for (std::int64_t p = first; p < first + count; ++p, ++slot) {
          for (std::int64_t i = 0; i < 2; ++i) {
            place[(i * rows_ + row) * seq_ + p] = ((rank * 2 + i) * rows_ + row) * local + slot;
          }
          if (rank == cut.rank) mine[row * local + slot] = p;
        }
      }
    }
    ranges_.push_back(by_rank[static_cast<std::size_t>(cut.rank)]);
  }
  own_ = own.to(device, /*non_blocking=*/true);
  places_ = places.to(device, /*non_blocking=*/true);
}

at::Tensor PackedPositions::own(const at::Tensor& x) const {
  at::Tensor index = own_.to(x.device());
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.at(1) = index.size(1);
  while (index.dim() < x.dim()) index = index.unsqueeze(-1);
  return at::gather(x, 1, index.expand(sizes));
}

at::Tensor PackedPositions::in_sequence(const at::Tensor& parts) const {
  const std::int64_t heads = parts.size(-2), head_dim = parts.size(-1);
  return at::index_select(parts.view({-1, heads, head_dim}), 0, places_.view(-1))
      .view({2, rows_, seq_, heads, head_dim});
}

void PackedPositions::to_parts(const at::Tensor& whole, std::int64_t keys_or_values, const at::Tensor& parts) const {
  const std::int64_t heads = parts.size(-2), head_dim = parts.size(-1);
  parts.view({-1, heads, head_dim})
      .index_copy_(0, places_[keys_or_values], whole.to(parts.scalar_type()).reshape({rows_ * seq_, heads, head_dim}));
}

}  // namespace phalanx
