// Reads the flight recorder files of a job: one file per rank, as comm/flight_log.h writes them.
//
// Reading is strict. It is an Error, which names the file, if a folder has no such file, if a file is not a flight
// recorder file, or if ranks occur twice or contradict each other. A rank without a file is not an error: it may be the
// rank that the user looks for.
//
//   const FlightFiles files = read_flight_files("outputs/comm_traces");
//   for (const auto& file : files.by_rank)
//     if (file) fmt::print("{}\n", file->path.string());
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "phalanx/observe/flight_recorder.h"

namespace phalanx::observe {

/// One rank's record of one group.
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
  std::vector<FlightFileGroup> groups;  // the first is the group of all ranks
};

struct FlightFiles {
  std::filesystem::path folder;
  std::vector<std::optional<FlightFile>> by_rank;  // [number of ranks of the job]
  std::set<std::string, std::less<>> texts;        // the strings that the entries' verb, dtype and op point to

  FlightFiles() = default;
  FlightFiles(FlightFiles&&) = default;
  FlightFiles& operator=(FlightFiles&&) = default;
};

/// Reads every *.json file of the folder.
FlightFiles read_flight_files(const std::filesystem::path& folder);

}  // namespace phalanx::observe
