#include "phalanx/nn/place_in_run.h"

#include <ATen/ops/empty.h>

#include <optional>

#include "phalanx/base/philox.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/tensor/counter_fill.h"

namespace phalanx::nn {
namespace {

/// Rows of equal length, equally far apart in the flat whole.
struct Rows {
  std::int64_t count, length, first, stride;
};

/// Nothing unless the box is cut along at most one dimension behind the first.
std::optional<Rows> rows_of(const Box& box, const std::vector<std::int64_t>& shape) {
  std::size_t cut = shape.size() - 1;
  while (cut > 0 && box.shape[cut] == shape[cut]) --cut;
  Rows rows{.count = 1, .length = 1, .first = 0, .stride = 1};
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (d > 0 && d < cut && box.shape[d] != shape[d]) return std::nullopt;
    rows.first = rows.first * shape[d] + box.offsets[d];
    (d < cut ? rows.count : rows.length) *= box.shape[d];
    if (d >= cut) rows.stride *= shape[d];
  }
  return rows;
}

/// Whether the numbers were drawn by a kernel of the tensor's device.
bool filled_by_kernel(const at::Tensor& tensor, const Init& init, std::uint64_t key, const Box& box,
                      const std::vector<std::int64_t>& shape) {
  if (init.kind != Init::Kind::uniform || tensor.scalar_type() != at::kFloat || tensor.dim() == 0) return false;
  const auto launch = kernels::gpu_launch(tensor);
  const auto rows = rows_of(box, shape);
  if (!launch || !rows) return false;
  // A part of a larger tensor is filled as a whole, and copied.
  const at::Tensor whole = tensor.is_contiguous() ? tensor : at::empty(tensor.sizes(), tensor.options());
  kernels::GpuLaunch::check("uniform", launch->kernels().uniform(launch->stream(), {.key = key,
                                                                                    .rows = rows->count,
                                                                                    .columns = rows->length,
                                                                                    .first = rows->first,
                                                                                    .row_stride = rows->stride,
                                                                                    .low = static_cast<float>(init.a),
                                                                                    .high = static_cast<float>(init.b),
                                                                                    .out = whole.data_ptr<float>()}));
  if (!whole.is_same(tensor)) tensor.copy_(whole);
  return true;
}

}  // namespace

void fill_in_run(const at::Tensor& tensor, const Init& init, const PlaceInRun& place, std::string_view name, Box box,
                 std::vector<std::int64_t> shape) {
  // Each step has its own streams, and within a step each layer, by name (stream_key()).
  const std::uint64_t seed = PhiloxStream(place.seed, static_cast<std::uint64_t>(place.step)).next_u64();
  box.offsets.at(0) += place.first_row;
  shape.at(0) += place.first_row;
  // fill_box() refuses another shape.
  const bool fits = tensor.sizes() == at::IntArrayRef(box.shape) && shape.size() == box.shape.size();
  if (fits && filled_by_kernel(tensor, init, stream_key(seed, name), box, shape)) return;
  fill_box(tensor, init, seed, name, box, shape);
}

}  // namespace phalanx::nn
