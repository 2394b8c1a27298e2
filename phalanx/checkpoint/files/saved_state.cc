#include "phalanx/checkpoint/files/saved_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/checkpoint/files/box_copy.h"
#include "phalanx/checkpoint/files/mismatch.h"
#include "phalanx/checkpoint/files/shard_plan.h"

namespace phalanx {

Manifest read_step_manifest(const std::filesystem::path& folder) {
  const auto path = folder / kManifestName;
  std::error_code error;
  if (!std::filesystem::exists(path, error))
    throw DamagedError(fmt::format("{} has no {}: its saving was not finished", folder.string(), kManifestName));
  Manifest manifest;
  try {
    manifest = parse_manifest(path.string(), read_file(path));
  } catch (const Error& failure) {
    throw DamagedError(failure.what());
  }
  for (const auto& file : manifest.files) {
    const auto size = std::filesystem::file_size(folder / file.name, error);
    if (error) throw DamagedError(fmt::format("{}: {}", (folder / file.name).string(), error.message()));
    if (size != file.size)
      throw DamagedError(
          fmt::format("{} has {} bytes; the manifest says {}", (folder / file.name).string(), size, file.size));
  }
  return manifest;
}

SavedState::SavedState(std::filesystem::path folder) : folder_(std::move(folder)) {
  manifest_ = read_step_manifest(folder_);
  collect();
}

SavedState::SavedState(std::filesystem::path folder, Manifest manifest)
    : folder_(std::move(folder)), manifest_(std::move(manifest)) {
  collect();
}

void SavedState::collect() {
  files_.reserve(manifest_.files.size());  // so that pointers of boxes stay valid
  for (const auto& entry : manifest_.files) files_.emplace_back(folder_, entry);
  for (std::size_t f = 0; f < files_.size(); ++f) {
    auto offsets = parse_saved_offsets(files_[f].path(), files_[f].header());
    for (const auto& info : files_[f].header().tensors) {
      const auto [found, is_new] = index_.try_emplace(info.name, tensors_.size());
      if (is_new) tensors_.push_back({info.name, info.dtype, std::vector<std::int64_t>(info.shape.size(), 0), {}});
      auto& tensor = tensors_[found->second];
      if (tensor.shape.size() != info.shape.size() || tensor.dtype != info.dtype)
        throw DamagedError(fmt::format("the parts of tensor {} do not agree on its type: {} in {} and {} in {}",
                                       safetensors::quote_name(info.name), describe_type(*tensor.boxes[0].info),
                                       files_[tensor.boxes[0].file].path(), describe_type(info), files_[f].path()));
      Box box{std::move(offsets.at(info.name)), info.shape};
      for (std::size_t d = 0; d < box.shape.size(); ++d)
        tensor.shape[d] = std::max(tensor.shape[d], box.offsets[d] + box.shape[d]);
      tensor.boxes.push_back({f, &info, std::move(box)});
    }
  }
  std::ranges::sort(tensors_, {}, &SavedTensor::name);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    index_[tensors_[i].name] = i;
    std::ranges::sort(tensors_[i].boxes, {}, [](const SavedBox& saved) { return saved.box.offsets; });
    if (!safetensors::byte_size(tensors_[i].dtype, tensors_[i].shape))
      throw DamagedError(fmt::format("{}: the parts of tensor {} span the shape {}, which overflows 64 bits",
                                     folder_.string(), safetensors::quote_name(tensors_[i].name),
                                     safetensors::format_shape(tensors_[i].shape)));
  }
}

const SavedTensor* SavedState::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

void SavedState::check_complete(const SavedTensor& tensor) const {
  const auto fail = [&](const std::string& reason) {
    throw DamagedError(
        fmt::format("{}: tensor {}: {}", folder_.string(), safetensors::quote_name(tensor.name), reason));
  };
  // If no two boxes overlap, the number of elements shows whether there is a gap. Boxes are in the order of their first
  // rows, so each must be compared only with those that have begun and not ended.
  const auto whole = tensor.whole();
  std::vector<const SavedBox*> open;
  std::int64_t elements = 0;
  for (const auto& saved : tensor.boxes) {
    if (saved.box.empty()) continue;
    if (!saved.box.shape.empty())
      std::erase_if(open, [&](const SavedBox* other) {
        return other->box.offsets[0] + other->box.shape[0] <= saved.box.offsets[0];
      });
    for (const auto* other : open) {
      if (intersect(other->box, saved.box))
        fail(fmt::format("the boxes {} of {} and {} of {} overlap", other->box.text(), files_[other->file].path(),
                         saved.box.text(), files_[saved.file].path()));
    }
    open.push_back(&saved);
    elements += saved.box.numel();
  }
  if (elements != whole.numel())
    fail(fmt::format("{} of the {} elements of {} {} are there", elements, whole.numel(),
                     safetensors::name_of(tensor.dtype), safetensors::format_shape(tensor.shape)));
}

std::uint64_t SavedState::read(const SavedTensor& tensor, const Box& wanted, std::span<std::byte> target) {
  std::uint64_t copied = 0;
  for (const auto& saved : tensor.boxes) {
    const auto common = intersect(saved.box, wanted);
    if (!common) continue;
    VerifiedFile& file = files_[saved.file];
    const auto size = safetensors::element_size(tensor.dtype);
    file.will_need(*saved.info, relative_to(*common, saved.box));
    // A block that has just been hashed is still in the processor's cache when it is copied.
    for_each_chunk(*common, static_cast<std::int64_t>(kHashBlockBytes / size), [&](const Box& piece) {
      const auto bytes = file.bytes_around(*saved.info, relative_to(piece, saved.box));
      copied += copy_part(piece, saved.box, bytes, wanted, target, size);
    });
  }
  return copied;
}

std::uint64_t SavedState::verified_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& file : files_) bytes += file.verified_bytes();
  return bytes;
}

}  // namespace phalanx
