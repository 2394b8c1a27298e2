// Rows of activations on their way between the ranks, piece by piece, so that products can be computed meanwhile.
//
//   ChunkedAllGather x(part, dim, comm);                            // begins: all ranks' parts come together
//   for (const RowChunk& p : x.chunks()) mm_out(y.narrow(0, p.first, p.count), x.wait(p), w.t());
//
//   ChunkedReduceScatter y(x.layout().of_width(out), options, comm);   // the sums of all ranks' addends, each rank its part
//   for (const RowChunk& p : y.chunks()) { at::Tensor rows = y.buffer(p); mm_out(rows, h.narrow(...), w.t()); y.send(p);
//   } part = y.finish();
//
// A tensor whose dimension `dim` is split over the ranks is [outer, ranks, inner, width] to us: outer is what lies
// before the dimension, width the last dimension.
// - outer = 1 (the first dimension is split): a rank's rows lie together. It can multiply its own at once, while the
//   others' come in one all-gather; and it computes the others' first and sends them while it computes its own. So
//   ranks may be half a product apart (at two ranks) without waiting for each other.
// - outer > 1: an all-gather, or a reduce-scatter, for each of the outer blocks, in which all ranks' rows lie together:
//   all but the first, or the last, are hidden behind the products of the others.
// Neither moves an element within a rank.
//
// Contract: collective; all ranks take the pieces in the order of chunks(), and use the communicator for nothing else
// until finish() or the last wait(). Sums are in the order of the ranks, 16-bit floats summed up in fp32: the bits are
// those of a reduce-scatter on shm or local.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "phalanx/comm/work.h"

namespace phalanx {

class Communicator;

struct RowLayout {
  std::int64_t outer = 1, ranks = 1, inner = 1, width = 1;
  std::vector<std::int64_t> part, whole;  // sizes of the tensors

  /// Of the tensor of which each rank has a part of these sizes; of all of it. Error where `dim` is no dimension or the
  /// last one, or where the ranks do not divide it.
  static RowLayout of_part(at::IntArrayRef sizes, std::int64_t dim, const Communicator& comm);
  static RowLayout of_whole(at::IntArrayRef sizes, std::int64_t dim, const Communicator& comm);
  RowLayout of_width(std::int64_t features) const;
  std::int64_t rows() const { return outer * ranks * inner; }
};

struct RowChunk {
  std::int64_t first = 0, count = 0;  // rows
  int number = 0;
};

class ChunkedAllGather {
 public:
  ChunkedAllGather(const at::Tensor& part, std::int64_t dim, Communicator& comm);
  const RowLayout& layout() const noexcept { return layout_; }
  const std::vector<RowChunk>& chunks() const noexcept { return chunks_; }
  /// The piece's rows, as soon as they are there.
  at::Tensor wait(const RowChunk& chunk) const;
  /// [rows, width]; what has been waited for.
  const at::Tensor& rows() const noexcept { return rows_; }

 private:
  RowLayout layout_;
  at::Tensor rows_;
  std::vector<RowChunk> chunks_;
  std::vector<Work> works_;  // one of each piece
};

class ChunkedReduceScatter {
 public:
  ChunkedReduceScatter(const RowLayout& layout, const at::TensorOptions& options, Communicator& comm);
  const std::vector<RowChunk>& chunks() const noexcept { return chunks_; }
  /// [count, width], to be written with this rank's addends.
  at::Tensor buffer(const RowChunk& chunk) const { return rows_.narrow(0, chunk.first, chunk.count); }
  void send(const RowChunk& chunk);
  /// This rank's part of the sums, in the part's sizes.
  at::Tensor finish();

 private:
  void exchange_rows();
  at::Tensor sum_of_received() const;

  RowLayout layout_;
  Communicator& comm_;
  at::Tensor rows_, part_;
  std::vector<at::Tensor> received_;  // by rank; outer = 1
  std::vector<RowChunk> chunks_;
  std::vector<Work> works_;
};

}  // namespace phalanx
