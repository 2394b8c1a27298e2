#include "phalanx/checkpoint/checkpoint_reader.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <fmt/format.h>

#include <span>
#include <unordered_set>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/files/mismatch.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/checkpoint/tensor_bytes.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx {

namespace {

/// Fills a wide parameter from its saved 16-bit values. If those still are the rounded master, the master is used.
std::uint64_t widen_by_master(const NamedTensor& parameter, at::ScalarType narrow, const SavedTensor& master,
                              SavedState& saved) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = parameter.tensor.detach();
  if (values.numel() == 0) return 0;
  const at::Tensor exact = at::empty(values.sizes(), values.options().dtype(scalar_type_of(master.dtype)));
  const std::uint64_t bytes =
      fill_tensor({parameter.name, exact, parameter.shard}, master.dtype,
                  [&](const Box& box, std::span<std::byte> target) { return saved.read(master, box, target); });
  values.copy_(at::where(exact.to(narrow).eq(values.to(narrow)), exact, values));
  return bytes;
}

}  // namespace

CheckpointReader::CheckpointReader(std::filesystem::path folder)
    : folder_(std::move(folder)), manifest_(read_step_manifest(folder_)) {}

ReadBytes CheckpointReader::read(const std::vector<NamedTensor>& tensors, ReadOptions options) const {
  SavedState saved(folder_, manifest_);
  const auto find = [&](const std::string& name) {
    const auto* found = saved.find(name);
    // A parameter that was saved in float32 has no master.
    return found != nullptr || !options.convert_dtype ? found : saved.find(parameter_of_master(name));
  };
  std::unordered_set<std::string> wanted;
  std::vector<NamedTensor> taken;
  // A state without masters, because its parameters are wide, must not lose the precision of the saved masters.
  const auto master_for = [&](const NamedTensor& named) -> const SavedTensor* {
    const std::string name = master_of(named.name);
    const auto *narrow = saved.find(named.name), *master = saved.find(name);
    const bool is_asked_for = options.convert_dtype && !options.allow_unexpected && !wanted.contains(name);
    const bool helps = narrow != nullptr && master != nullptr && master->shape == narrow->shape &&
                       safetensors::element_size(narrow->dtype) < named.tensor.itemsize();
    return is_asked_for && helps ? master : nullptr;
  };
  Mismatches mismatches;
  for (const auto& named : tensors) {
    const auto info = describe_tensor(named);
    if (!wanted.insert(named.name).second)
      throw CheckpointError(fmt::format("the state names tensor {} twice", safetensors::quote_name(named.name)));
    const auto* found = find(named.name);
    const bool fits =
        found != nullptr && info.shape == found->shape && (info.dtype == found->dtype || options.convert_dtype);
    if (fits) {
      taken.push_back(named);
    } else if (is_of_layout(named.name)) {
      continue;  // it belongs to another layout, or to none
    } else if (found == nullptr) {
      mismatches.missing(info);
    } else {
      mismatches.differs(info, {.name = found->name, .dtype = found->dtype, .shape = found->shape});
    }
  }
  const auto stands_for_its_parameter = [&](const std::string& name) {
    return options.convert_dtype && wanted.contains(parameter_of_master(name));
  };
  for (const auto& tensor : saved.tensors()) {
    if (stands_for_its_parameter(tensor.name)) continue;
    if (!options.allow_unexpected && !wanted.contains(tensor.name) && !is_of_layout(tensor.name))
      mismatches.unexpected({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  // Damaged files are reported before tensors that do not fit: an older checkpoint may then be used.
  for (const auto& named : tensors) {
    if (const auto* found = find(named.name)) saved.check_complete(*found);
    if (const auto* master = master_for(named)) saved.check_complete(*master);
  }
  mismatches.throw_if_any(fmt::format("checkpoint {} does not fit this model", folder_.string()), options.advice);

  ReadBytes bytes;
  for (const auto& named : taken) {
    const auto& tensor = *find(named.name);
    bytes.taken += fill_tensor(named, tensor.dtype, [&](const Box& box, std::span<std::byte> target) {
      return saved.read(tensor, box, target);
    });
    if (const auto* master = master_for(named)) {
      bytes.taken += widen_by_master(named, scalar_type_of(tensor.dtype), *master, saved);
    }
  }
  bytes.verified = saved.verified_bytes();
  return bytes;
}

}  // namespace phalanx
