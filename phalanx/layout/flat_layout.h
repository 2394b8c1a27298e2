// FlatLayout: the positions of the parameters of an FSDP unit in its flat buffer, such that every rank's shard consists
// of whole rows. Torch-free.
//
// The flat buffer of a unit has ranks * shard_elements elements. Rank r owns the slice [r, r + 1) * shard_elements, so
// all-gather and reduce-scatter work on the buffer directly. Each parameter is one contiguous piece of it. Two rules
// make every shard a box (some rows of each parameter): no boundary between ranks is inside a row, and a parameter is
// never interrupted. The order of the parameters, the gaps between them and shard_elements are chosen to satisfy both
// rules; the smallest shard found is used. Where it can be, rows of one length are together. The rest is padding. It is
// below 1 % for the blocks of Llamas of 1 B parameters and more, while a rank has at least a hundred rows of the
// longest kind (2048 x 8192 over 128 ranks: 58 rows, 1.7 %).
//
// The same arguments give the same layout on every rank. The idea of flat units with ragged rows is from Megatron-FSDP
// and veScale.
//
//   const FlatLayout layout = lay_out_flat({{4096, 4096}, {14336, 4096}, {4096, 14336}, {4096, 1}}, /*ranks=*/8);
//   layout.rows_of(1, 3);       // rows of the second parameter that rank 3 owns
#pragma once

#include <cstdint>
#include <vector>

namespace phalanx::fsdp {

struct FlatParameter {
  std::int64_t rows = 0;          // the first dimension
  std::int64_t row_elements = 1;  // the product of the other dimensions
  std::int64_t numel() const noexcept { return rows * row_elements; }
};

struct RowRange {
  std::int64_t begin = 0, end = 0;
  bool operator==(const RowRange&) const = default;
};

struct FlatLayout {
  int ranks = 1;
  std::int64_t shard_elements = 0;
  std::vector<FlatParameter> parameters;
  std::vector<std::int64_t> offsets;  // of each parameter in the flat buffer

  std::int64_t flat_elements() const noexcept { return shard_elements * ranks; }
  std::int64_t padding() const noexcept;  // elements that belong to no parameter
  /// The rows of a parameter in a rank's shard; begin == end if there are none.
  RowRange rows_of(std::size_t parameter, int rank) const noexcept;
};

/// Parameters may be empty (no rows), and a unit may have no parameters.
/// REQUIRES: every parameter has at least one element per row.
FlatLayout lay_out_flat(const std::vector<FlatParameter>& parameters, int ranks);

}  // namespace phalanx::fsdp
