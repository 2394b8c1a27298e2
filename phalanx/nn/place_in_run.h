// Random numbers that are a pure function of (seed, step, name, index in the global batch), so that they do not depend
// on the layout: ranks, replicas and micro-batches that have some rows of a batch get there what one device with the
// whole batch gets. A pass that is computed again has the same.
//
//   const PlaceInRun place{.seed = 1, .step = step, .first_row = rank * rows_per_rank};
//   fill_in_run(u, Init::uniform(0.0, 1.0), place, "layers.0.dropout", {{0, 0}, {rows, dim}}, {rows, dim});
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "phalanx/tensor/init.h"

namespace phalanx::nn {

/// Where in a training run a forward pass is.
struct PlaceInRun {
  std::uint64_t seed = 0;
  std::int64_t step = 0;       // of the optimizer
  std::int64_t first_row = 0;  // of the pass's first row in the global batch of this step
};

/// Fills `tensor` with the numbers of a layer, by name. Rows are the first dimension. `box`: what `tensor` is of all
/// that the ranks with these rows have, whose shape is `shape`; rows count from place.first_row. Throws Error if the
/// box has another shape than `tensor`. On a GPU uniform numbers in fp32 of a box that is cut along at most one
/// dimension behind the first are drawn there, by one kernel on the current stream, with the same bits. Others are
/// drawn by the host, which waits until they are copied.
void fill_in_run(const at::Tensor& tensor, const Init& init, const PlaceInRun& place, std::string_view name, Box box,
                 std::vector<std::int64_t> shape);

}  // namespace phalanx::nn
