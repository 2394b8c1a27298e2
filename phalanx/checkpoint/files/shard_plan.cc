#include "phalanx/checkpoint/files/shard_plan.h"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/json_text.h"

namespace phalanx {
namespace {

constexpr const char* kShardingInfoKey = "DCP_SHARDING_INFO";
constexpr const char* kSavedOffsetsKey = "saved_offsets";

std::int64_t rows_of(const safetensors::TensorInfo& tensor) { return tensor.shape.empty() ? 1 : tensor.shape[0]; }

std::uint64_t bytes_of(const safetensors::TensorInfo& tensor) {
  const auto size = safetensors::byte_size(tensor.dtype, tensor.shape);
  if (!size)
    throw CheckpointError(fmt::format("tensor {} of shape {} is too large", safetensors::quote_name(tensor.name),
                                      safetensors::format_shape(tensor.shape)));
  return *size;
}

/// The row nearest to the point after `part` of `parts` of all bytes: (tensor, row), row < rows of tensor.
std::pair<std::size_t, std::int64_t> cut(const std::vector<safetensors::TensorInfo>& tensors, std::uint64_t total,
                                         int part, int parts) {
  if (part == 0) return {0, 0};
  if (part == parts) return {tensors.size(), 0};
  const auto n = static_cast<std::uint64_t>(parts), k = static_cast<std::uint64_t>(part);
  const std::uint64_t target = total / n * k + total % n * k / n;
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::uint64_t size = bytes_of(tensors[i]);
    if (target < begin + size) {
      const std::uint64_t row_bytes = size / static_cast<std::uint64_t>(rows_of(tensors[i]));
      const auto row = static_cast<std::int64_t>((target - begin + row_bytes / 2) / row_bytes);
      if (row == rows_of(tensors[i])) return {i + 1, 0};
      return {i, row};
    }
    begin += size;
  }
  return {tensors.size(), 0};
}

}  // namespace

std::vector<ShardPart> plan_shard(const std::vector<safetensors::TensorInfo>& tensors, int rank, int world_size) {
  std::uint64_t total = 0;
  for (const auto& tensor : tensors) total += bytes_of(tensor);
  const auto [first, first_row] = cut(tensors, total, rank, world_size);
  const auto [last, last_row] = cut(tensors, total, rank + 1, world_size);
  std::vector<ShardPart> parts;
  for (std::size_t i = first; i < tensors.size() && i <= last; ++i) {
    const std::int64_t begin = i == first ? first_row : 0;
    const std::int64_t end = i == last ? last_row : rows_of(tensors[i]);
    // A tensor without elements is still written, by the rank whose range includes it.
    if (begin < end || (i < last && begin == 0)) parts.push_back({i, begin, end});
  }
  return parts;
}

std::string shard_file_name(int rank) { return fmt::format("shard-{:05}-model-00001-of-00001.safetensors", rank + 1); }

std::map<std::string, std::string> sharding_metadata(const SavedOffsets& offsets) {
  auto info = nlohmann::json::object();
  for (const auto& [name, saved] : offsets) info[name][kSavedOffsetsKey] = saved;
  return {{kShardingInfoKey, info.dump()}, {"DCP_VERSION", "1.0"}, {"format", "pt"}};
}

SavedOffsets parse_saved_offsets(const std::string& file, const safetensors::Header& header) {
  const auto fail = [&](const std::string& reason) { throw CheckpointError(fmt::format("{}: {}", file, reason)); };
  SavedOffsets result;
  const auto found = header.metadata.find(kShardingInfoKey);
  if (found == header.metadata.end()) {
    for (const auto& tensor : header.tensors) result[tensor.name].assign(tensor.shape.size(), 0);
    return result;
  }
  const auto info = parse_json_object<CheckpointError>(found->second, fmt::format("{}: {}", file, kShardingInfoKey));
  for (const auto& tensor : header.tensors) {
    auto& offsets = result[tensor.name];
    try {
      for (const auto& offset : info.at(tensor.name).at(kSavedOffsetsKey).get_ref<const nlohmann::json::array_t&>()) {
        // The library would convert a float to an integer too. A number that is too large becomes negative.
        offsets.push_back(offset.get_ref<const nlohmann::json::number_integer_t&>());
      }
    } catch (const nlohmann::json::exception&) {
      fail(
          fmt::format("{} has no saved_offsets for tensor {}", kShardingInfoKey, safetensors::quote_name(tensor.name)));
    }
    bool valid = offsets.size() == tensor.shape.size();
    for (std::size_t d = 0; valid && d < offsets.size(); ++d)
      valid = offsets[d] >= 0 && offsets[d] <= std::numeric_limits<std::int64_t>::max() - tensor.shape[d];
    if (!valid)
      fail(fmt::format("saved_offsets {} of tensor {} do not fit its shape {}", safetensors::format_shape(offsets),
                       safetensors::quote_name(tensor.name), safetensors::format_shape(tensor.shape)));
  }
  return result;
}

}  // namespace phalanx
