// The arguments of `phalanx checkpoint merge`.
#pragma once

#include <cstdint>
#include <string>

#include "cli/command.h"

namespace phalanx::cli {

struct MergeArguments {
  std::string model, out;
  std::string adapter;  // empty: the model is a run's that trains adapters
  bool allow_base_mismatch = false;
  std::string dtype = "float32";
  std::uint64_t max_file_bytes = 0;  // 0: one file
  bool quiet = false;
};

/// Throws a UsageError for wrong ones.
MergeArguments parse_merge_arguments(const Arguments& arguments);

}  // namespace phalanx::cli
