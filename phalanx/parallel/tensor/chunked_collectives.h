// Collectives on rows of activations, chunk by chunk, so that matrix products overlap with the transfers.
//
//   ChunkedAllGather x(part, dim, comm);                      // starts to gather all ranks' parts
//   for (const RowChunk& p : x.chunks()) {
//     at::Tensor rows = y.narrow(0, p.first, p.count);
//     at::mm_out(rows, x.wait(p), w.t());
//   }
//
//   ChunkedReduceScatter sum(x.layout().of_width(out), options, comm);   // each rank gets its part of the sums
//   for (const RowChunk& p : sum.chunks()) {
//     at::Tensor rows = sum.buffer(p);
//     at::mm_out(rows, h.narrow(0, p.first, p.count), w.t());
//     sum.send(p);
//   }
//   at::Tensor result = sum.finish();
//
// A tensor that is split over the ranks along dimension `dim` is viewed as [outer, ranks, inner, width]: outer is the
// product of the dimensions before `dim`, width the last dimension.
// - outer = 1 (the first dimension is split): a rank's rows are contiguous. The all-gather side multiplies the rank's
//   own rows at once, while one all-gather brings the others'. The reduce-scatter side computes the other ranks' rows
//   first and sends them while it computes its own. So ranks may be half a product apart (with two ranks) without
//   waiting for each other.
// - outer > 1: one all-gather, or one reduce-scatter, for each of the outer blocks, which hold rows of all ranks. All
//   but the first (or the last) are hidden behind the products of other blocks.
// Neither case moves an element within a rank.
//
// Contract: collective. All ranks take the chunks in the order of chunks(), and use the communicator for nothing else
// until finish() or the last wait(). Sums are taken in rank order, and 16-bit floats are summed in fp32: the bits are
// those of a reduce-scatter on the shm or local backend.
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

  /// Layout for a tensor given by the sizes of one rank's part, or by the sizes of the whole. Throws Error if `dim` is
  /// not a dimension or is the last one, or if the number of ranks does not divide it.
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
  /// Waits for the chunk and returns its rows.
  at::Tensor wait(const RowChunk& chunk) const;
  /// [rows, width]; valid for the chunks that have been waited for.
  const at::Tensor& rows() const noexcept { return rows_; }

 private:
  RowLayout layout_;
  at::Tensor rows_;
  std::vector<RowChunk> chunks_;
  std::vector<Work> works_;  // one per chunk
};

class ChunkedReduceScatter {
 public:
  ChunkedReduceScatter(const RowLayout& layout, const at::TensorOptions& options, Communicator& comm);
  const std::vector<RowChunk>& chunks() const noexcept { return chunks_; }
  /// [count, width]. The caller writes this rank's addends to it.
  at::Tensor buffer(const RowChunk& chunk) const { return rows_.narrow(0, chunk.first, chunk.count); }
  void send(const RowChunk& chunk);
  /// Returns this rank's part of the sums, with the part's sizes.
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
