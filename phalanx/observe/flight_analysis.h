// Who is to blame for a hang: the flight recorder files of all ranks, laid side by side.
//
// Group by group, collectives are matched by their number, which is the same on every rank. The first one that is not
// finished everywhere is where the group stands; ranks that have not issued it are missing, ranks that have issued
// something else are at odds. A rank that is missing in one group because it waits in another is not the cause: the
// verdict is about the group whose missing rank waits for nobody, and about all of them where they wait in a circle.
//
//   const FlightAnalysis found = analyze_flight_files(read_flight_files("outputs/comm_traces"));
//   fmt::print("{}", to_text(found));
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/observe/flight_files.h"

namespace phalanx::observe {

/// From the most to the least telling; the verdict is about the first.
enum class FlightMatchState : std::uint8_t {
  mismatch,   // the ranks called different operations
  absent,     // a rank is missing that waits for nobody
  unsent,     // a message for which its peer has issued nothing, and which waits for nobody
  circle,     // whoever is missing waits elsewhere
  failed,     // everybody came, and yet it failed
  under_way,  // everybody has come, not everybody is done
  uneven,     // all done, and some have done less: the files are of different moments
  none,
};

/// Members that stand at the same operation.
struct FlightStanding {
  std::vector<int> ranks;    // of the job, as everywhere in here
  std::int64_t number = -1;  // of the operation: the group's incomplete one, or the last before it; -1: none
  std::string state;         // "started", ...; "no file", "not in the group", "nothing issued"
  std::string call;
  double seconds = 0;  // since the operation reached that state, when the file was written; the longest
};

struct FlightGroupReport {
  std::string name;
  std::string id;
  std::vector<int> members;
  FlightMatchState match_state = FlightMatchState::none;
  std::int64_t number = -1;   // of the incomplete collective; -1: there is none
  std::int64_t since_us = 0;  // when it was first issued
  int missing_elsewhere = 0;  // missing ranks that wait in another operation: the more, the less it is the cause
  std::string sentence;       // what is wrong; empty for none
  std::vector<FlightStanding> standings;  // all members, in the order of their first rank
};

struct FlightReason {
  std::vector<int> ranks;
  std::string text;
};

struct FlightAnalysis {
  std::string verdict;                    // one sentence, several where ranks wait in a circle
  std::vector<FlightGroupReport> groups;  // the most telling first
  std::vector<FlightReason> reasons;      // why the files were written, the earliest first
  std::vector<int> ranks_without_file;
};

FlightAnalysis analyze_flight_files(const FlightFiles& files);

/// Verdict, a table for each group, reasons.
std::string to_text(const FlightAnalysis& analysis);

/// "rank 3", "ranks 0, 2, 5 to 9".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace phalanx::observe
