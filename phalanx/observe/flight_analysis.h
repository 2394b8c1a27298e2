// Finds the cause of a hang by comparing the flight recorder files of all ranks.
//
// Within each process group, collectives are matched by their number, which is the same on every rank. A group hangs at
// its first collective that is not finished on every rank. Ranks that have not issued it are missing. Ranks that have
// issued another operation mismatch. A rank that is missing in one group because it waits in another is not the cause.
// So the verdict is about the group whose missing rank waits for nobody. If groups wait for each other in a circle, it
// is about all of them.
//
//   const FlightAnalysis found = analyze_flight_files(read_flight_files("outputs/comm_traces"));
//   fmt::print("{}", to_text(found));
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/observe/flight_files.h"

namespace phalanx::observe {

/// From the most to the least likely cause; the verdict is about the first.
enum class FlightMatchState : std::uint8_t {
  mismatch,   // the ranks called different operations
  absent,     // a rank is missing, and it waits for nobody
  unsent,     // the peer of a message has not issued its side, and waits for nobody
  circle,     // all missing ranks wait in other operations
  failed,     // all ranks have issued it, but it failed
  under_way,  // all ranks have issued it, but not all have finished
  uneven,     // all operations are finished, but some ranks have fewer: the files are from different times
  none,
};

/// Members of a group that are at the same operation.
struct FlightStanding {
  std::vector<int> ranks;    // ranks of the job, as everywhere in this header
  std::int64_t number = -1;  // of the operation: the group's incomplete one, or the last before it; -1: none
  std::string state;         // "started", ...; "no file", "not in the group", "nothing issued"
  std::string call;
  double seconds = 0;  // from when the operation reached that state until the file was written; the longest
};

struct FlightGroupReport {
  std::string name;
  std::string id;
  std::vector<int> members;
  FlightMatchState match_state = FlightMatchState::none;
  std::int64_t number = -1;   // of the incomplete collective; -1: there is none
  std::int64_t since_us = 0;  // when it was first issued
  int missing_elsewhere = 0;  // missing ranks that wait in another operation; more of them: less likely the cause
  std::string sentence;       // what is wrong; empty for `none`
  std::vector<FlightStanding> standings;  // all members, in the order of their first rank
};

struct FlightReason {
  std::vector<int> ranks;
  std::string text;
};

struct FlightAnalysis {
  std::string verdict;                    // one sentence; several if ranks wait in a circle
  std::vector<FlightGroupReport> groups;  // the most likely cause first
  std::vector<FlightReason> reasons;      // why the files were written, the earliest first
  std::vector<int> ranks_without_file;
};

FlightAnalysis analyze_flight_files(const FlightFiles& files);

/// The verdict, a table for each group, and the reasons.
std::string to_text(const FlightAnalysis& analysis);

/// "rank 3", "ranks 0, 2, 5 to 9".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace phalanx::observe
