#include "phalanx/checkpoint/staging_buffer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <utility>

namespace phalanx {
namespace {

constexpr std::uint64_t kAlignment = 64;

at::Tensor rows_of(const NamedTensor& named, const PlannedBox& planned) {
  const auto tensor = named.tensor.detach();
  return tensor.dim() == 0 ? tensor : tensor.narrow(0, planned.row_begin, planned.row_end - planned.row_begin);
}

}  // namespace

StagedBoxes StagingBuffer::copy(const std::vector<NamedTensor>& tensors, const std::vector<PlannedBox>& boxes) {
  const at::NoGradGuard no_grad;
  std::uint64_t needed = 0;
  const auto place = [&](std::uint64_t bytes) {
    const auto at = needed;
    needed += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  for (const auto& planned : boxes) place(rows_of(tensors[planned.tensor], planned).nbytes());
  if (!bytes_.defined() || bytes_.nbytes() < needed)
    bytes_ = at::empty({static_cast<std::int64_t>(needed)}, at::TensorOptions().dtype(at::kByte));

  StagedBoxes staged;
  needed = 0;
  for (const auto& planned : boxes) {
    const auto& named = tensors[planned.tensor];
    const auto rows = rows_of(named, planned);
    auto* const memory = static_cast<std::byte*>(bytes_.mutable_data_ptr()) + place(rows.nbytes());
    auto copy = at::from_blob(memory, rows.sizes(), at::TensorOptions().dtype(rows.scalar_type()));
    copy.copy_(rows);
    staged.bytes += rows.nbytes();
    staged.boxes.push_back({staged.tensors.size(), planned.box, 0, planned.row_end - planned.row_begin});
    staged.tensors.push_back({named.name, std::move(copy)});
  }
  return staged;
}

}  // namespace phalanx
