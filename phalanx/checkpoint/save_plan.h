// Plans which rank writes which boxes of a state, so that every element of every global tensor is written exactly once.
//
// - A tensor with a shard is written by the first holders of its boxes (ShardSpec::is_first_holder), each its own box.
//   If several ranks have the same position in the tensor's mesh (a sub-mesh), the lowest of them writes.
// - A replicated tensor is cut into even parts along its rows (shard_plan.h), so that all ranks write at the same time.
// - For a tensor without elements the first rank writes the name and the global shape. Empty boxes are not written.
//
// Every rank describes its state in a local plan. All ranks get all local plans, and each plans its own part by itself.
//
//   const auto local_plans = comm.all_gather_bytes(create_local_plan(state, step));
//   const auto items = plan_save(state.tensors, local_plans, rank);
//   const ManifestFile entry = write_shard_file(fs, path, state.tensors, items);
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/layout/box.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx {

/// A part of one tensor of the state that one rank writes.
struct WriteItem {
  std::size_t tensor = 0;                   // index in the state's tensors
  Box box;                                  // in the global tensor
  std::int64_t row_begin = 0, row_end = 0;  // the same box, as rows of this rank's tensor
};

/// Returns a digest of what must be the same on all ranks (names, global shapes, dtypes, placements, integers, step;
/// not the values), and this rank's positions in the tensors' meshes. Throws CheckpointError if a tensor cannot be
/// saved, such as a partial one.
std::string create_local_plan(const TrainState& state, std::int64_t step);

/// Throws CheckpointError if the local plans are of different states, or if some part of a tensor is on no rank.
std::vector<WriteItem> plan_save(const std::vector<NamedTensor>& tensors, const std::vector<std::string>& local_plans,
                                 int rank);

/// Writes the boxes to one file, with their offsets in its metadata.
/// ENSURES: the file is written, synced and closed.
ManifestFile write_shard_file(FileSystem& fs, const std::filesystem::path& path,
                              const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes);

}  // namespace phalanx
