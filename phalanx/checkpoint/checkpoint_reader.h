// Reads a step directory: its manifest, then tensors from its shard files, whoever wrote how many of them.
//
// A wanted tensor may be spread over any number of boxes in any files, and one with a shard is filled with its rank's
// box alone, so any layout loads into any other. Only the blocks that hold wanted bytes are read, each verified
// (saved_state.h); a tensor of which not every element is found is an error, never left half loaded unnoticed.
//
//   const CheckpointReader reader("run/checkpoint/step-100");
//   reader.read(named_tensors, {.allow_unexpected = true});     // copies into the live tensors
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

struct ReadOptions {
  bool allow_unexpected = false;  // leave saved tensors alone that are not asked for
  bool convert_dtype = false;     // else a saved dtype that differs is an error: a resumed run must be exact
  std::string advice = {};        // ends the error about tensors that do not fit: what the user may do
};

struct ReadBytes {
  std::uint64_t taken = 0;     // that went into tensors, in the saved dtype
  std::uint64_t verified = 0;  // of the whole blocks that were read and checked for them, headers included
};

class CheckpointReader {
 public:
  /// Reads the manifest and checks that every file it names is there in its size; a DamagedError says what is not.
  explicit CheckpointReader(std::filesystem::path folder);

  const std::filesystem::path& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  /// Names, global shapes and dtypes are compared before the first tensor is touched.
  ReadBytes read(const std::vector<NamedTensor>& tensors, ReadOptions options = {}) const;

 private:
  std::filesystem::path folder_;
  Manifest manifest_;
};

}  // namespace phalanx
