// Plans which rank writes which part of a checkpoint, and where each part belongs in its global tensor. It does not use
// torch.
//
// Replicated state is cut into world_size parts of nearly equal bytes, along the rows (first dimension) of its tensors.
// So all ranks write at the same time and each element is written exactly once. Every rank computes the same plan from
// the same list, so nothing needs to be sent.
//
// The offsets of a part go into its file's metadata in the layout of PyTorch's distributed checkpoints over
// safetensors:
//   "DCP_SHARDING_INFO": {"model.norm.weight": {"saved_offsets": [128]}, ...}
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "phalanx/checkpoint/files/safetensors.h"

namespace phalanx {

/// Rows [row_begin, row_end) of tensor number `tensor`; a tensor without dimensions has one row.
struct ShardPart {
  std::size_t tensor = 0;
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
};

/// The parts that `rank` of `world_size` writes. Of `tensors` only dtype and shape are used.
std::vector<ShardPart> plan_shard(const std::vector<safetensors::TensorInfo>& tensors, int rank, int world_size);

/// "shard-00001-model-00001-of-00001.safetensors" for rank 0: the name that PyTorch gives to a rank's file.
std::string shard_file_name(int rank);

using SavedOffsets = std::map<std::string, std::vector<std::int64_t>>;
/// The __metadata__ of a shard file: sharding information, version, format.
std::map<std::string, std::string> sharding_metadata(const SavedOffsets& offsets);
/// Offsets of every tensor of the file; zeros if the file has no sharding information. `file` is for messages.
SavedOffsets parse_saved_offsets(const std::string& file, const safetensors::Header& header);

}  // namespace phalanx
