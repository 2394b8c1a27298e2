#include "phalanx/report/run_marks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "phalanx/base/human.h"
#include "phalanx/base/json_difference.h"
#include "phalanx/base/json_number.h"
#include "phalanx/report/run_json.h"

namespace phalanx::report {
namespace {

using nlohmann::json;

std::string ranks_text(double ranks) { return fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s"); }

std::vector<std::string> changes_of(const json& entry) {
  std::vector<std::string> texts;
  const auto changes = entry.find("changes");
  if (changes == entry.end() || !changes->is_array()) return texts;
  for (const json& change : *changes) {
    if (!change.is_object()) continue;
    const auto value = [&](const char* key) {
      return json_value_text(change.contains(key) ? std::optional<json>(change[key]) : std::nullopt);
    };
    const std::string note = json_text(change, "note");
    texts.push_back(fmt::format("{}: {} → {}{}{}", json_text(change, "key"), value("saved"), value("now"),
                                note.empty() ? "" : ": ", note));
  }
  return texts;
}

bool is_rollback(const json& run, std::int64_t step) {
  const auto branches = run.find("branches");
  return branches != run.end() && branches->is_array() && std::ranges::any_of(*branches, [&](const json& branch) {
           return branch.is_object() && json_number(branch, "step") == static_cast<double>(step);
         });
}

/// The layouts before and after, where both starts recorded theirs. False if one did not.
bool set_layout(RunMark& mark, const std::string& before, const std::string& now) {
  if (before.empty() || now.empty()) {
    if (!now.empty()) mark.layout = fmt::format("{} (the one before is not recorded)", now);
    return false;
  }
  mark.layout_changed = before != now;
  mark.layout = mark.layout_changed ? fmt::format("{} → {}", before, now) : now + ", as before";
  return true;
}

/// A resume of the curve, and the layout from there on; empty: not recorded.
struct Resume {
  std::size_t mark = 0;
  std::string layout;
  bool is_told = false;  // the layout before is recorded, too
};

/// Between two steps of the curve the number of ranks changes. That was one of the resumes in between. If only one of
/// them can have changed the layout, it was that one.
void tell_change(RunMarks& found, const std::vector<Resume>& between, std::int64_t step, double before, double now) {
  const std::string change = fmt::format("{} → {}", ranks_text(before), ranks_text(now));
  if (between.empty()) {
    found.marks.push_back({.step = step,
                           .resumed = false,
                           .layout_changed = true,
                           .layout = change + " (as metrics.jsonl tells)",
                           .note = "run.json has no resume here"});
    return;
  }
  const auto may_have = [&](const Resume& one) { return !one.is_told || found.marks[one.mark].layout_changed; };
  const bool is_certain = std::ranges::count_if(between, may_have) == 1;
  for (const Resume& one : between) {
    if (one.is_told) continue;
    RunMark& mark = found.marks[one.mark];
    mark.layout_changed = is_certain;
    if (!is_certain)
      mark.layout = fmt::format("{}{} at this resume or at another one after step {} (as metrics.jsonl tells)",
                                one.layout.empty() ? "" : one.layout + "; ", change, with_commas(step));
    else
      mark.layout = fmt::format("{} → {} (as metrics.jsonl tells)", ranks_text(before),
                                one.layout.empty() ? ranks_text(now) : one.layout);
  }
}

/// What the number of ranks that wrote their memory tells beyond run.json.
void tell_changes_of_ranks(RunMarks& found, const std::vector<Resume>& resumes, const Curve& ranks) {
  for (std::size_t i = 1; i < ranks.steps.size(); ++i) {
    if (ranks.values[i] == ranks.values[i - 1]) continue;
    std::vector<Resume> between;
    std::ranges::copy_if(resumes, std::back_inserter(between), [&](const Resume& one) {
      const std::int64_t step = found.marks[one.mark].step;
      return ranks.steps[i - 1] <= step && step < ranks.steps[i];
    });
    tell_change(found, between, ranks.steps[i - 1], ranks.values[i - 1], ranks.values[i]);
  }
}

}  // namespace

std::string RunMark::text() const {
  std::string line = fmt::format("{} after step {}", resumed ? "resumed" : "changed", with_commas(step));
  if (!note.empty()) line += ", " + note;
  if (!layout.empty()) line += "; layout: " + layout;
  if (!changes.empty()) line += fmt::format("; {}", fmt::join(changes, "; "));
  return line;
}

RunMarks run_marks(const json& run, const MetricsFile& metrics) {
  RunMarks found;
  const auto history = run.find("history");
  const auto begun = run.find("begun");
  const std::string first = begun != run.end() && begun->is_object() ? json_text(*begun, "layout") : "";
  std::vector<Resume> on_curve;  // of the curve as it is so far
  std::size_t unreadable = 0;
  const bool has_list = history != run.end() && history->is_array();
  if (history != run.end() && !has_list) {
    found.notes.emplace_back("run.json: \"history\" is no list: no resume is marked");
  }
  for (const json& entry : has_list ? *history : json::array()) {
    if (!entry.is_object() || !entry.contains("step") || !is_whole_number(entry["step"])) {
      ++unreadable;
      continue;
    }
    RunMark mark{.step = entry["step"], .time = json_number(entry, "time").value_or(0)};
    // The steps that an earlier start made from there on were dropped.
    while (!on_curve.empty() && found.marks[on_curve.back().mark].step >= mark.step) {
      found.marks[on_curve.back().mark].on_curve = false;
      on_curve.pop_back();
    }
    const std::string now = json_text(entry, "layout");
    const bool is_told = set_layout(mark, on_curve.empty() ? first : on_curve.back().layout, now);
    mark.changes = changes_of(entry);
    if (is_rollback(run, mark.step)) mark.note = "rolled back to it";
    on_curve.push_back({.mark = found.marks.size(), .layout = now, .is_told = is_told});
    found.marks.push_back(std::move(mark));
  }
  if (unreadable > 0) {
    found.notes.push_back(fmt::format("run.json: {} of \"history\" without an integer \"step\": not marked as a resume",
                                      unreadable == 1 ? "an entry" : fmt::format("{} entries", unreadable)));
  }
  tell_changes_of_ranks(found, on_curve, metrics.ranks);
  return found;
}

}  // namespace phalanx::report
