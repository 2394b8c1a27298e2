#include "phalanx/checkpoint/checkpoint_reader.h"

#include <fmt/format.h>

#include <unordered_set>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/mismatch.h"
#include "phalanx/checkpoint/saved_state.h"
#include "phalanx/checkpoint/tensor_bytes.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx {

CheckpointReader::CheckpointReader(std::filesystem::path folder)
    : folder_(std::move(folder)), manifest_(read_step_manifest(folder_)) {}

ReadBytes CheckpointReader::read(const std::vector<NamedTensor>& tensors, ReadOptions options) const {
  SavedState saved(folder_, manifest_);
  std::unordered_set<std::string> wanted;
  std::vector<NamedTensor> taken;
  Mismatches mismatches;
  for (const auto& named : tensors) {
    const auto info = describe_tensor(named);
    if (!wanted.insert(named.name).second)
      throw CheckpointError(fmt::format("the state names tensor {} twice", safetensors::quote_name(named.name)));
    const auto* found = saved.find(named.name);
    const bool fits =
        found != nullptr && info.shape == found->shape && (info.dtype == found->dtype || options.convert_dtype);
    if (fits) {
      taken.push_back(named);
    } else if (is_of_layout(named.name)) {
      continue;  // that of another layout, or none
    } else if (found == nullptr) {
      mismatches.missing(info);
    } else {
      mismatches.differs(info, {.name = found->name, .dtype = found->dtype, .shape = found->shape});
    }
  }
  for (const auto& tensor : saved.tensors()) {
    if (!options.allow_unexpected && !wanted.contains(tensor.name) && !is_of_layout(tensor.name))
      mismatches.unexpected({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  // What is wrong with the files comes before what does not fit: an older checkpoint may then serve.
  for (const auto& named : tensors) {
    if (const auto* found = saved.find(named.name)) saved.check_complete(*found);
  }
  mismatches.throw_if_any(fmt::format("checkpoint {} does not fit this model", folder_.string()), options.advice);

  ReadBytes bytes;
  for (const auto& named : taken) {
    const auto& tensor = *saved.find(named.name);
    bytes.taken += fill_tensor(named, tensor.dtype, [&](const Box& box, std::span<std::byte> target) {
      return saved.read(tensor, box, target);
    });
  }
  bytes.verified = saved.verified_bytes();
  return bytes;
}

}  // namespace phalanx
