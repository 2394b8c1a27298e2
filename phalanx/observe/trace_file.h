// Reads the traces that the ranks of a run wrote (trace.h): their spans.
//
//   for (const TraceFile& trace : read_trace_files("outputs/run/profile_traces/iteration_10"))
//     fmt::print("rank {}: {} spans\n", trace.rank, trace.spans.size());
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
  double epoch_seconds = 0.0;        // of the first span, by the clock of the rank's node
  std::vector<TraceFileSpan> spans;  // in the file's order, which is the order of their ends
};

/// Reads every *_trace.json file of the folder; the result is sorted by rank. Throws Error for a folder without such
/// files, for a file that is not a trace, and for two files of one rank.
std::vector<TraceFile> read_trace_files(const std::filesystem::path& folder);

}  // namespace phalanx::observe
