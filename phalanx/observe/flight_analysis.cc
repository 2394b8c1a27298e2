#include "phalanx/observe/flight_analysis.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "phalanx/base/human.h"

namespace phalanx::observe {
namespace {

bool is_over(const FlightEntry& entry) { return entry.state == FlightState::finished; }
bool is_waiting(const FlightEntry& entry) {
  return entry.state == FlightState::issued || entry.state == FlightState::started;
}

std::int64_t reached_us(const FlightEntry& entry) {
  return entry.ended_us != 0 ? entry.ended_us : entry.started_us != 0 ? entry.started_us : entry.issued_us;
}

double seconds(std::int64_t microseconds) { return static_cast<double>(microseconds) * 1e-6; }

// One member of a group.
struct Member {
  int rank = 0;  // rank in the job
  const FlightFile* file = nullptr;
  const FlightFileGroup* group = nullptr;  // null: there is no file, or the rank is not in the group (any more, or yet)
  const FlightEntry* at = nullptr;         // its collective with the number of the group's incomplete one
  const FlightEntry* last = nullptr;       // its last collective
  std::int64_t number_of_last() const { return last != nullptr ? last->collective : -1; }
};

struct Group {
  const FlightFileGroup* any = nullptr;
  std::vector<Member> members;
  FlightGroupReport report;
  std::vector<int> missing;  // for `absent` and `circle`
  std::vector<int> waiting;

  std::string call(const FlightEntry& entry) const { return describe(entry, any->members); }
};

// --- how far a group has come ---------------------------------------------------------------------------------------

std::vector<Group> collect_groups(const FlightFiles& files) {
  std::map<std::string, Group> by_id;
  for (const auto& file : files.by_rank) {
    if (!file) continue;
    for (const FlightFileGroup& one : file->groups) by_id[one.id].any = &one;
  }
  std::vector<Group> groups;
  for (auto& [id, group] : by_id) {
    for (const int rank : group.any->members) {
      Member member{.rank = rank};
      const auto& file = files.by_rank[static_cast<std::size_t>(rank)];
      if (file) {
        member.file = &*file;
        for (const FlightFileGroup& one : file->groups) {
          if (one.id == id) member.group = &one;
        }
      }
      if (member.group != nullptr) {
        for (const FlightEntry& entry : member.group->entries) {
          if (entry.collective != FlightEntry::kNone) member.last = &entry;
        }
      }
      group.members.push_back(member);
    }
    group.report.name = group.any->name;
    group.report.id = id;
    group.report.members = group.any->members;
    groups.push_back(std::move(group));
  }
  return groups;
}

// The first collective that the ranks called with different arguments; -1: none. The counts of an uneven all_to_all,
// which may differ, are not compared.
std::int64_t first_mismatch(const Group& group) {
  std::map<std::int64_t, std::string> calls;
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  for (const Member& member : group.members) {
    if (member.group == nullptr) continue;
    for (const FlightEntry& entry : member.group->entries) {
      if (entry.collective == FlightEntry::kNone || entry.collective >= first) continue;
      const auto [known, is_new] = calls.emplace(entry.collective, describe(entry));
      if (!is_new && known->second != describe(entry)) first = entry.collective;
    }
  }
  return first == std::numeric_limits<std::int64_t>::max() ? -1 : first;
}

// The first collective that some rank has not finished; -1: none.
std::int64_t first_incomplete(const Group& group) {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  for (const Member& member : group.members) {
    if (member.group == nullptr) continue;
    for (const FlightEntry& entry : member.group->entries) {
      if (entry.collective != FlightEntry::kNone && !is_over(entry)) first = std::min(first, entry.collective);
    }
  }
  return first == std::numeric_limits<std::int64_t>::max() ? -1 : first;
}

void stand_at(Group& group, std::int64_t number) {
  group.report.number = number;
  for (Member& member : group.members) {
    if (member.group == nullptr) continue;
    for (const FlightEntry& entry : member.group->entries) {
      if (entry.collective != number) continue;
      member.at = &entry;
      if (group.report.since_us == 0 || entry.issued_us < group.report.since_us)
        group.report.since_us = entry.issued_us;
    }
  }
}

// --- what a missing rank does instead -------------------------------------------------------------------------------

struct Elsewhere {
  const FlightFileGroup* group = nullptr;
  const FlightEntry* entry = nullptr;
};

// Another operation that this rank waits in or that has failed. A failed one is used only if no operation waits.
Elsewhere waits_elsewhere(const FlightFile& file, const std::string& group_id, std::int64_t number) {
  Elsewhere failed;
  for (const FlightFileGroup& group : file.groups) {
    for (const FlightEntry& entry : group.entries) {
      if (is_over(entry) || (group.id == group_id && entry.collective == number)) continue;
      if (is_waiting(entry)) return {&group, &entry};
      if (failed.entry == nullptr) failed = {&group, &entry};
    }
  }
  return failed;
}

std::string place_of(const FlightFileGroup& group, const FlightEntry& entry) {
  const std::string call = describe(entry, group.members);
  if (entry.collective == FlightEntry::kNone) return fmt::format("{} of group '{}'", call, group.name);
  return fmt::format("op {} of group '{}', {}", entry.collective, group.name, call);
}

std::string why_missing(const Group& group, const Member& member) {
  if (member.file == nullptr) return "it has left no file";
  const Elsewhere other = waits_elsewhere(*member.file, group.report.id, group.report.number);
  if (other.entry != nullptr) {
    return fmt::format("it {} {}", is_waiting(*other.entry) ? "waits in" : "failed in",
                       place_of(*other.group, *other.entry));
  }
  if (member.group == nullptr) return "it has no communicator of that group, not yet or not any more";
  if (member.last == nullptr) return "it has issued nothing in that group";
  return fmt::format("its last there is op {}, {}, {} {} before it wrote its file", member.last->collective,
                     group.call(*member.last), name_of(member.last->state),
                     human_duration(seconds(member.file->written_us - reached_us(*member.last))));
}

std::string is_or_are(const std::vector<int>& ranks) { return ranks.size() == 1 ? "is" : "are"; }

std::string capital(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text;
}

// --- verdicts -------------------------------------------------------------------------------------------------------

void judge_mismatch(Group& group) {
  std::vector<std::pair<std::string, std::vector<int>>> calls;
  for (const Member& member : group.members) {
    if (member.at == nullptr) continue;
    const std::string call = group.call(*member.at);
    auto found = std::find_if(calls.begin(), calls.end(), [&](const auto& one) { return one.first == call; });
    if (found == calls.end()) found = calls.insert(calls.end(), {call, {}});
    found->second.push_back(member.rank);
  }
  std::vector<std::string> parts;
  parts.reserve(calls.size());
  for (const auto& [call, ranks] : calls) parts.push_back(fmt::format("{} called {}", ranks_text(ranks), call));
  group.report.match_state = FlightMatchState::mismatch;
  group.report.sentence = fmt::format("The ranks do not call the same operation as op {} of group '{}': {}.",
                                      group.report.number, group.report.name, fmt::join(parts, "; "));
}

void judge_missing(Group& group) {
  std::vector<std::string> reasons;
  const Member* at = nullptr;  // the member that has waited longest
  for (const Member& member : group.members) {
    if (member.at != nullptr) {
      group.waiting.push_back(member.rank);
      if (at == nullptr || member.at->issued_us < at->at->issued_us) at = &member;
    } else if (std::find(group.missing.begin(), group.missing.end(), member.rank) != group.missing.end()) {
      const bool waits = member.file != nullptr &&
                         waits_elsewhere(*member.file, group.report.id, group.report.number).entry != nullptr;
      if (waits) ++group.report.missing_elsewhere;
      reasons.push_back(group.missing.size() == 1
                            ? why_missing(group, member)
                            : fmt::format("rank {}: {}", member.rank, why_missing(group, member)));
    }
  }
  constexpr std::size_t kShown = 8;  // there may be a thousand ranks
  if (reasons.size() > kShown) {
    const std::size_t more = reasons.size() - kShown;
    reasons.resize(kShown);
    reasons.push_back(fmt::format("and {} more", more));
  }
  const bool all_wait = group.report.missing_elsewhere == static_cast<int>(group.missing.size());
  group.report.match_state = all_wait ? FlightMatchState::circle : FlightMatchState::absent;
  const bool failed = at->at->state == FlightState::failed;
  const std::string since =
      human_duration(seconds((failed ? at->at->ended_us : at->file->written_us) - at->at->issued_us));
  group.report.sentence =
      capital(fmt::format("{} {} at op {} of group '{}', {}, {} {}, and {} {} missing: {}.", ranks_text(group.waiting),
                          is_or_are(group.waiting), group.report.number, group.report.name, group.call(*at->at),
                          failed ? "which failed after" : "waiting for", since, ranks_text(group.missing),
                          is_or_are(group.missing), fmt::join(reasons, "; ")));
}

void judge_complete(Group& group) {
  const Member* first = nullptr;
  const Member* last = nullptr;
  const Member* failure = nullptr;
  std::vector<int> waiting;
  for (const Member& member : group.members) {
    if (member.at == nullptr) continue;
    if (first == nullptr || member.at->issued_us < first->at->issued_us) first = &member;
    if (last == nullptr || member.at->issued_us > last->at->issued_us) last = &member;
    if (is_waiting(*member.at)) waiting.push_back(member.rank);
    if (member.at->state == FlightState::failed &&
        (failure == nullptr || member.at->ended_us < failure->at->ended_us)) {
      failure = &member;
    }
  }
  FlightGroupReport& report = group.report;
  const std::string what = fmt::format("op {} of group '{}', {}", report.number, report.name, group.call(*first->at));
  if (failure == nullptr) {
    report.match_state = FlightMatchState::under_way;
    report.sentence = capital(fmt::format(
        "{} {} still in {}, issued by every rank: nobody is missing, so it is moving data, or its transport is stuck.",
        ranks_text(waiting), is_or_are(waiting), what));
    return;
  }
  report.match_state = FlightMatchState::failed;
  if (last->rank == first->rank || last->at->issued_us == first->at->issued_us) {
    report.sentence = fmt::format("Every rank has issued {}, and it failed.", what);
  } else {
    report.sentence = fmt::format(
        "Every rank has issued {}, and it failed: rank {} came last, {} after rank {}{}.", what, last->rank,
        human_duration(seconds(last->at->issued_us - first->at->issued_us)), first->rank,
        last->at->issued_us > failure->at->ended_us ? fmt::format(", when rank {} had given up", failure->rank) : "");
  }
}

// A pending message, if there is one: its peer has not issued the matching side, or the transport is working on it.
void judge_messages(Group& group) {
  for (const Member& member : group.members) {
    if (member.group == nullptr) continue;
    for (const FlightEntry& entry : member.group->entries) {
      if (entry.collective != FlightEntry::kNone || is_over(entry)) continue;
      FlightGroupReport& report = group.report;
      report.since_us = entry.issued_us;
      const std::string what =
          fmt::format("Rank {} {} {} of group '{}'", member.rank, is_waiting(entry) ? "waits in" : "failed in",
                      group.call(entry), report.name);
      if (entry.peer < 0 || static_cast<std::size_t>(entry.peer) >= group.members.size()) {
        report.match_state = FlightMatchState::under_way;
        report.sentence = what + ".";
        return;
      }
      const Member& peer = group.members[static_cast<std::size_t>(entry.peer)];
      const std::string_view wanted = entry.verb == "send" ? "recv" : "send";
      const bool answered =
          peer.group != nullptr &&
          std::any_of(peer.group->entries.begin(), peer.group->entries.end(), [&](const auto& one) {
            return one.verb == wanted && one.tag == entry.tag && !is_over(one) && one.peer == member.group->rank;
          });
      if (answered) {
        report.match_state =
            entry.state == FlightState::failed ? FlightMatchState::failed : FlightMatchState::under_way;
        report.sentence = fmt::format("{}, which rank {} has issued too.", what, peer.rank);
        return;
      }
      const bool waits = peer.file != nullptr && waits_elsewhere(*peer.file, "", -1).entry != nullptr;
      report.match_state = waits ? FlightMatchState::circle : FlightMatchState::unsent;
      report.sentence = fmt::format("{}, and rank {} has no such {} under way: {}.", what, peer.rank, wanted,
                                    why_missing(group, peer));
      return;
    }
  }
}

void judge_finished(Group& group) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  std::int64_t most = -1;
  for (const Member& member : group.members) {
    if (member.group == nullptr) continue;
    least = std::min(least, member.number_of_last());
    most = std::max(most, member.number_of_last());
  }
  if (least >= most) return;
  std::vector<int> behind;
  for (const Member& member : group.members) {
    if (member.group != nullptr && member.number_of_last() < most) behind.push_back(member.rank);
  }
  group.report.match_state = FlightMatchState::uneven;
  group.report.sentence = fmt::format(
      "Nobody waits in group '{}', but {} {} behind: op {} is the last of all and op {} of the furthest, so the files "
      "are "
      "of different moments.",
      group.report.name, ranks_text(behind), is_or_are(behind), least, most);
}

void judge(Group& group) {
  const std::int64_t number = first_incomplete(group);
  const std::int64_t mismatch = first_mismatch(group);
  // Calls after a failure prove nothing.
  if (mismatch >= 0 && (number < 0 || mismatch <= number)) {
    stand_at(group, mismatch);
    judge_mismatch(group);
    return;
  }
  if (number < 0) {
    judge_messages(group);
    if (group.report.match_state == FlightMatchState::none) judge_finished(group);
    return;
  }
  stand_at(group, number);
  for (const Member& member : group.members) {
    // A rank that is past this number has finished it, even if its ring has lost the entry.
    if (member.at == nullptr && member.number_of_last() < number) group.missing.push_back(member.rank);
  }
  if (group.missing.empty()) {
    judge_complete(group);
  } else {
    judge_missing(group);
  }
}

// --- the table ------------------------------------------------------------------------------------------------------

void fill_standings(Group& group) {
  for (const Member& member : group.members) {
    FlightStanding standing{.ranks = {member.rank}};
    const FlightEntry* entry = member.at != nullptr ? member.at : member.last;
    if (member.group != nullptr && group.report.number < 0) {
      for (const FlightEntry& one : member.group->entries) {
        if (one.collective == FlightEntry::kNone && !is_over(one)) entry = &one;
      }
    }
    if (member.file == nullptr) {
      standing.state = "no file";
    } else if (member.group == nullptr) {
      standing.state = "not in it";
    } else if (entry == nullptr) {
      standing.state = "no op yet";
    } else {
      standing.number = entry->collective;
      standing.state = name_of(entry->state);
      standing.call = group.call(*entry);
      standing.seconds = seconds(member.file->written_us - reached_us(*entry));
    }
    auto& all = group.report.standings;
    const auto same = std::find_if(all.begin(), all.end(), [&](const FlightStanding& one) {
      return one.number == standing.number && one.state == standing.state && one.call == standing.call;
    });
    if (same == all.end()) {
      all.push_back(std::move(standing));
    } else {
      same->ranks.push_back(member.rank);
      same->seconds = std::max(same->seconds, standing.seconds);
    }
  }
}

std::vector<FlightReason> collect_reasons(const FlightFiles& files) {
  std::vector<const FlightFile*> by_time;
  for (const auto& file : files.by_rank) {
    if (file) by_time.push_back(&*file);
  }
  std::stable_sort(by_time.begin(), by_time.end(),
                   [](const FlightFile* a, const FlightFile* b) { return a->written_us < b->written_us; });
  std::vector<FlightReason> reasons;
  for (const FlightFile* file : by_time) {
    auto same = std::find_if(reasons.begin(), reasons.end(), [&](const auto& one) { return one.text == file->reason; });
    if (same == reasons.end()) same = reasons.insert(reasons.end(), {{}, file->reason});
    same->ranks.push_back(file->rank);
  }
  for (FlightReason& reason : reasons) std::sort(reason.ranks.begin(), reason.ranks.end());
  return reasons;
}

std::string verdict_on(const std::vector<FlightGroupReport>& groups, const FlightFiles& files,
                       const std::vector<int>& without_file) {
  const FlightMatchState worst = groups.empty() ? FlightMatchState::none : groups.front().match_state;
  if (worst == FlightMatchState::none) {
    std::string text = fmt::format("Nothing is stuck: {} finished all operations of {} group{}",
                                   without_file.empty()        ? "all ranks have"
                                   : files.by_rank.size() == 1 ? "the rank has"
                                                               : "the ranks that left a file have",
                                   groups.size(), groups.size() == 1 ? "" : "s");
    if (!without_file.empty()) {
      text += fmt::format("; {} {} left none", ranks_text(without_file), without_file.size() == 1 ? "has" : "have");
    }
    return text + ".";
  }
  if (worst != FlightMatchState::circle) return groups.front().sentence;
  std::string text = "The ranks wait for each other.";
  for (const FlightGroupReport& group : groups) {
    if (group.match_state == FlightMatchState::circle) text += " " + group.sentence;
  }
  return text;
}

}  // namespace

FlightAnalysis analyze_flight_files(const FlightFiles& files) {
  FlightAnalysis analysis;
  for (std::size_t rank = 0; rank < files.by_rank.size(); ++rank) {
    if (!files.by_rank[rank]) analysis.ranks_without_file.push_back(static_cast<int>(rank));
  }
  for (Group& group : collect_groups(files)) {
    judge(group);
    fill_standings(group);
    analysis.groups.push_back(std::move(group.report));
  }
  std::stable_sort(analysis.groups.begin(), analysis.groups.end(), [](const auto& a, const auto& b) {
    return std::tie(a.match_state, a.missing_elsewhere, a.since_us) <
           std::tie(b.match_state, b.missing_elsewhere, b.since_us);
  });
  analysis.reasons = collect_reasons(files);
  analysis.verdict = verdict_on(analysis.groups, files, analysis.ranks_without_file);
  return analysis;
}

}  // namespace phalanx::observe
