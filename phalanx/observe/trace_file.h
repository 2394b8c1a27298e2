// The traces that a run's ranks wrote (trace.h), read again: their spans.
//
//   for (const TraceFile& rank : read_trace_files("outputs/run/profile_traces/iteration_10")) ...
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace phalanx::observe {

struct TraceFileSpan {
  std::string name, category;
  double begin_seconds = 0.0, end_seconds = 0.0;  // since the first span of the file
};

struct TraceFile {
  int rank = 0;
  double epoch_seconds = 0.0;        // of the first span, by the clock of the rank's machine
  std::vector<TraceFileSpan> spans;  // in the file's order: as they ended
};

/// Every *_trace.json file of the folder, by rank. An Error names a folder that holds none, a file that is no trace,
/// and two files of one rank.
std::vector<TraceFile> read_trace_files(const std::filesystem::path& folder);

}  // namespace phalanx::observe
