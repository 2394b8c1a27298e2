// CheckpointReader reads a step directory: its manifest, then tensors from its shard files. Any number of ranks may
// have written them.
//
// A tensor may be spread over any number of boxes in any files. A tensor with a shard is filled only with its rank's
// box. So any layout loads into any other. Only the blocks that hold the requested bytes are read, and each is verified
// (saved_state.h). A tensor with missing elements is an error; it is never left partly loaded without one.
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
  bool allow_unexpected = false;  // ignore saved tensors that are not asked for; else they are an error
  bool convert_dtype = false;     // else another saved dtype is an error: a resumed run must be exact
  std::string advice = {};        // the end of the error about tensors that do not fit: what the user may do
};

struct ReadBytes {
  std::uint64_t taken = 0;     // copied into tensors, in the saved dtype
  std::uint64_t verified = 0;  // of the whole blocks that were read and checked for them, including headers
};

class CheckpointReader {
 public:
  /// Reads the manifest and checks that every file it names exists and has its size. Throws DamagedError that names
  /// what is wrong.
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
