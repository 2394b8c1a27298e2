// PackedPositions: which positions of each packed row this rank has, and where those of all ranks are, for tensors. The
// cut is that of layout/packed_cut.h.
//
//   const PackedPositions packed(cut, *documents);
//   packed.own(tokens);                                       // [rows, seq] -> [rows, positions of this rank]
//   at::Tensor whole = packed.in_sequence(parts_of_all_ranks);
//
// Immutable. The copies to a device are asynchronous.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "phalanx/layout/context_cut.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx {

class PackedPositions {
 public:
  /// `documents`: of padded rows. Throws Error if they are not.
  PackedPositions(const ContextCut& cut, const DocumentBoundaries& documents);

  /// This rank's, by row.
  const std::vector<std::vector<PositionRange>>& ranges() const noexcept { return ranges_; }
  /// This rank's of x [rows, seq, ...], on any device.
  at::Tensor own(const at::Tensor& x) const;
  /// Keys and values of all ranks, parts [ranks, 2, rows, local, heads, head_dim], in the order of the sequence:
  /// [2, rows, seq, heads, head_dim].
  at::Tensor in_sequence(const at::Tensor& parts) const;
  /// The other way round, into `parts`: keys (0) or values (1) [rows, seq, heads, head_dim].
  void to_parts(const at::Tensor& whole, std::int64_t keys_or_values, const at::Tensor& parts) const;

 private:
  std::int64_t rows_, seq_;
  std::vector<std::vector<PositionRange>> ranges_;
  at::Tensor own_;  // int64 [rows, local]
  at::Tensor
      places_;  // int64 [2, rows * seq]: where a position's key and value are, counted in [ranks, 2, rows, local]
};

}  // namespace phalanx
