// Which rank writes which boxes of a state: every element of every global tensor exactly once.
//
// - A tensor with a shard is written by the first holders of its boxes (ShardSpec::is_first_holder), each its own.
//   Where several ranks have the same place in the tensor's mesh (a sub-mesh), the lowest of them.
// - A replicated tensor is cut into even parts along its rows (shard_plan.h), so that all ranks write at once.
// - Of a tensor without elements the first rank writes the name and the global shape; empty boxes are not written.
//
// Every rank describes its state in a note, all ranks see all notes, and each plans its own part by itself.
//
//   const auto notes = comm.all_gather_bytes(create_local_plan(state, step));
//   const ManifestFile entry = write_shard_file(fs, path, state.tensors, plan_save(state.tensors, notes, rank));
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

/// What one rank writes of a tensor of the state.
struct WriteItem {
  std::size_t tensor = 0;                   // which of the state's tensors
  Box box;                                  // in the global tensor
  std::int64_t row_begin = 0, row_end = 0;  // the same, as rows of the tensor that the rank has
};

/// A digest of what must be the same on all ranks (names, global shapes, dtypes, placements, integers, step; not the
/// values), and this rank's places in the tensors' meshes. CheckpointError if a tensor cannot be saved, such as a
/// partial one.
std::string create_local_plan(const TrainState& state, std::int64_t step);

/// CheckpointError if the notes are of different states, or if some part of a tensor is on no rank.
std::vector<WriteItem> plan_save(const std::vector<NamedTensor>& tensors, const std::vector<std::string>& local_plans,
                                 int rank);

/// Writes the boxes to one file with their offsets in its metadata: written, synced, closed.
ManifestFile write_shard_file(FileSystem& fs, const std::filesystem::path& path,
                              const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes);

}  // namespace phalanx
