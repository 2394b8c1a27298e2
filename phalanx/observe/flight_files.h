// The flight recorder files of a job, read back: one file a rank, as comm/flight_log.h writes them.
//
// Strict: a folder without such files, a file that is none, ranks that come twice or contradict each other are Errors
// that name the file. A rank without a file is none: that is what is looked for.
//
//   const FlightFiles files = read_flight_files("outputs/comm_traces");
//   for (const auto& file : files.by_rank) if (file) ...
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "phalanx/observe/flight_recorder.h"

namespace phalanx::observe {

/// What one rank knows of one group.
struct FlightFileGroup {
  std::string name;
  std::string id;  // the same on all members
  int rank = 0;
  std::vector<int> members;  // ranks of the job
  std::vector<FlightEntry> entries;
};

struct FlightFile {
  std::filesystem::path path;
  int rank = 0;
  int size = 1;
  std::string host;
  std::int64_t pid = 0;
  std::int64_t written_us = 0;  // since the epoch
  std::string reason;
  std::vector<FlightFileGroup> groups;  // the first is that of all ranks
};

struct FlightFiles {
  std::filesystem::path folder;
  std::vector<std::optional<FlightFile>> by_rank;  // [number of ranks of the job]
  std::set<std::string, std::less<>> texts;        // what the entries' verbs, dtypes and ops point to

  FlightFiles() = default;
  FlightFiles(FlightFiles&&) = default;
  FlightFiles& operator=(FlightFiles&&) = default;
};

/// Reads every *.json file of the folder.
FlightFiles read_flight_files(const std::filesystem::path& folder);

}  // namespace phalanx::observe
