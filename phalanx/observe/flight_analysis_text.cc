// The flight analysis as text.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "phalanx/base/human.h"
#include "phalanx/observe/flight_analysis.h"

namespace phalanx::observe {
namespace {

std::string standing_of(const FlightGroupReport& group) {
  if (group.number >= 0) return fmt::format("op {} is incomplete", group.number);
  if (group.match_state == FlightMatchState::none) return "all finished";
  if (group.match_state == FlightMatchState::uneven) return "nobody waits";
  return "a message is under way";
}

}  // namespace

std::string ranks_text(const std::vector<int>& ranks) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;
    parts.push_back(end - i == 1 ? std::to_string(ranks[i]) : fmt::format("{} to {}", ranks[i], ranks[end - 1]));
    i = end;
  }
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(parts, ", "));
}

std::string to_text(const FlightAnalysis& analysis) {
  std::string text = analysis.verdict + "\n";
  for (const FlightGroupReport& group : analysis.groups) {
    text += fmt::format("\ngroup '{}' of {}: {}\n", group.name, ranks_text(group.members), standing_of(group));
    std::size_t width = 5;
    for (const FlightStanding& one : group.standings) width = std::max(width, ranks_text(one.ranks).size());
    text += fmt::format("  {:<{}}  {:>8}  {:<9}  {:>8}  {}\n", "", width, "op", "state", "for", "call");
    for (const FlightStanding& one : group.standings) {
      if (one.call.empty()) {
        text += fmt::format("  {:<{}}  {:>8}  {}\n", ranks_text(one.ranks), width, "-", one.state);
        continue;
      }
      text += fmt::format("  {:<{}}  {:>8}  {:<9}  {:>8}  {}\n", ranks_text(one.ranks), width,
                          one.number >= 0 ? std::to_string(one.number) : "message", one.state,
                          human_duration(one.seconds), one.call);
    }
  }
  text += "\nwhy the files were written, the earliest first:\n";
  for (const FlightReason& reason : analysis.reasons) {
    text += fmt::format("  {}: {}\n", ranks_text(reason.ranks), reason.text);
  }
  return text;
}

}  // namespace phalanx::observe
