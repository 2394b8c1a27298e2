#include "phalanx/checkpoint/checkpoint_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/checkpoint/mismatch.h"
#include "phalanx/checkpoint/shard_plan.h"
#include "phalanx/checkpoint/tensor_bytes.h"
#include "phalanx/checkpoint/verified_file.h"

namespace phalanx {
namespace {

/// One tensor of the state as a reader meets it: what is wanted, and what was found so far.
struct WantedTensor {
  safetensors::TensorInfo info;
  at::Tensor tensor;
  safetensors::TensorInfo found;  // shape: the extent of the boxes found
  std::int64_t elements_found = 0;
};

std::int64_t count_elements(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  for (const auto dimension : shape) product *= dimension;
  return product;
}

void add_box(WantedTensor& wanted, const safetensors::TensorInfo& box, const std::vector<std::int64_t>& offsets) {
  auto& extent = wanted.found.shape;
  if (wanted.found.name.empty()) {
    wanted.found = {.name = box.name, .dtype = box.dtype, .shape = std::vector<std::int64_t>(box.shape.size(), 0)};
  }
  if (extent.size() != box.shape.size() || wanted.found.dtype != box.dtype)
    throw CheckpointError(fmt::format("the parts of tensor {} do not agree on its type: {} and {}",
                                      safetensors::quote_name(box.name), describe_type(wanted.found),
                                      describe_type(box)));
  for (std::size_t d = 0; d < extent.size(); ++d) extent[d] = std::max(extent[d], offsets[d] + box.shape[d]);
  wanted.elements_found += count_elements(box.shape);
}

}  // namespace

CheckpointReader::CheckpointReader(std::filesystem::path folder) : folder_(std::move(folder)) {
  const auto path = folder_ / kManifestName;
  std::error_code error;
  if (!std::filesystem::exists(path, error))
    throw DamagedError(fmt::format("{} has no {}: its saving was not finished", folder_.string(), kManifestName));
  try {
    manifest_ = parse_manifest(path.string(), read_file(path));
  } catch (const Error& failure) {
    throw DamagedError(failure.what());
  }
  for (const auto& file : manifest_.files) {
    const auto size = std::filesystem::file_size(folder_ / file.name, error);
    if (error) throw DamagedError(fmt::format("{}: {}", (folder_ / file.name).string(), error.message()));
    if (size != file.size)
      throw DamagedError(
          fmt::format("{} has {} bytes; the manifest says {}", (folder_ / file.name).string(), size, file.size));
  }
}

std::uint64_t CheckpointReader::read(const std::vector<NamedTensor>& tensors, ReadOptions options) const {
  std::vector<VerifiedFile> files;
  std::vector<SavedOffsets> offsets;
  for (const auto& entry : manifest_.files) {
    files.emplace_back(folder_, entry);
    offsets.push_back(parse_saved_offsets(files.back().path(), files.back().header()));
  }

  std::unordered_map<std::string, WantedTensor> wanted;
  for (const auto& named : tensors) {
    if (!wanted.try_emplace(named.name, describe_tensor(named), named.tensor).second)
      throw CheckpointError(fmt::format("the state names tensor {} twice", safetensors::quote_name(named.name)));
  }
  Mismatches mismatches;
  for (std::size_t f = 0; f < files.size(); ++f) {
    for (const auto& box : files[f].header().tensors) {
      const auto found = wanted.find(box.name);
      if (found != wanted.end()) {
        add_box(found->second, box, offsets[f].at(box.name));
      } else if (!options.allow_unexpected) {
        mismatches.unexpected(box);
      }
    }
  }
  for (const auto& named : tensors) {  // in the state's order, so that messages do not depend on hashing
    const auto& [info, tensor, found, elements] = wanted.at(named.name);
    if (found.name.empty()) {
      mismatches.missing(info);
    } else if (info.shape != found.shape || (info.dtype != found.dtype && !options.convert_dtype)) {
      mismatches.differs(info, found);
    } else if (elements != count_elements(info.shape)) {
      mismatches.other(fmt::format("{}: {} of {} elements are there", safetensors::quote_name(info.name), elements,
                                   count_elements(info.shape)));
    }
  }
  mismatches.throw_if_any(fmt::format("checkpoint {} does not fit this model", folder_.string()), options.advice);

  std::uint64_t bytes = 0;
  for (std::size_t f = 0; f < files.size(); ++f) {
    for (const auto& box : files[f].header().tensors) {
      const auto found = wanted.find(box.name);
      if (found == wanted.end()) continue;
      write_tensor_box(found->second.tensor, box, offsets[f].at(box.name), files[f].bytes(box));
      bytes += box.size();
    }
  }
  return bytes;
}

}  // namespace phalanx
