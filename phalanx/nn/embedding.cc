#include "phalanx/nn/embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/kernels/embedding.h"

namespace phalanx::nn {

Embedding::Embedding(const EmbeddingOptions& options, TensorOptionsOfModule tensor) : Module("Embedding") {
  weight = make_parameter("weight", {options.count, options.dim}, tensor);
}

at::Tensor Embedding::look_up_own_rows(const at::Tensor& table, const at::Tensor& ids, const Shard& shard) const {
  const std::int64_t count = shard.spec.shape()[0];
  if (ids.device().is_cpu() && ids.numel() > 0) {
    const auto [least, greatest] = at::aminmax(ids);
    const auto low = least.item<std::int64_t>(), high = greatest.item<std::int64_t>();
    if (low < 0 || high >= count) {
      throw DataError(fmt::format("id {} is outside the vocabulary of '{}': expected 0 to {}", low < 0 ? low : high,
                                  shard.spec.name(), count - 1));
    }
  }
  const at::Tensor row = ids - shard.box().offsets[0];
  const at::Tensor elsewhere = row.lt(0).logical_or_(row.ge(table.size(0)));
  return kernels::embedding(table, row.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0);
}

at::Tensor Embedding::forward(const at::Tensor& ids) {
  const at::Tensor table = used("weight", weight);
  const auto shard = shard_of("weight");
  const bool has_all_rows = !shard || table.size(0) == shard->spec.shape()[0];
  const at::Tensor rows = has_all_rows ? kernels::embedding(table, ids) : look_up_own_rows(table, ids, *shard);
  return output_dtype_ ? rows.to(*output_dtype_) : rows;
}

}  // namespace phalanx::nn
