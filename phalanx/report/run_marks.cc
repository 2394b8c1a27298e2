#include "phalanx/report/run_marks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "phalanx/base/human.h"
#include "phalanx/base/json_difference.h"
#include "phalanx/base/json_number.h"
#include "phalanx/report/run_json.h"

namespace phalanx::train {
namespace {

using nlohmann::json;

/// "2 ranks" of the last step up to `step`, or of the first one after it; nothing without one.
std::optional<double> ranks_at(const Curve& ranks, std::int64_t step, bool after) {
  const auto next = std::ranges::upper_bound(ranks.steps, step);
  const std::ptrdiff_t index = next - ranks.steps.begin() - (after ? 0 : 1);
  if (index < 0 || index >= std::ssize(ranks.steps)) return std::nullopt;
  return ranks.values[static_cast<std::size_t>(index)];
}

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

/// The layouts before and after, from what both starts recorded, else from the ranks that wrote their memory.
void set_layout(RunMark& mark, const std::string& before, const std::string& now, const Curve& ranks) {
  if (!before.empty() && !now.empty()) {
    mark.layout_changed = before != now;
    mark.layout = mark.layout_changed ? fmt::format("{} → {}", before, now) : now + ", as before";
    return;
  }
  if (!now.empty()) mark.layout = fmt::format("{} (the one before is not recorded)", now);
  const auto ranks_before = ranks_at(ranks, mark.step, /*after=*/false), ranks_now = ranks_at(ranks, mark.step, true);
  if (!ranks_before || !ranks_now || *ranks_before == *ranks_now) return;
  mark.layout_changed = true;
  mark.layout = fmt::format("{} → {} (as metrics.jsonl tells)", ranks_text(*ranks_before),
                            now.empty() ? ranks_text(*ranks_now) : now);
}

/// A change of the number of ranks at which run.json has no resume.
void add_unrecorded(RunMarks& found, const Curve& ranks) {
  for (std::size_t i = 1; i < ranks.steps.size(); ++i) {
    const std::int64_t before = ranks.steps[i - 1], now = ranks.steps[i];
    if (ranks.values[i] == ranks.values[i - 1]) continue;
    const auto is_told = [&](const RunMark& mark) { return mark.on_curve && before <= mark.step && mark.step < now; };
    if (std::ranges::any_of(found.marks, is_told)) continue;
    found.marks.push_back({.step = before,
                           .resumed = false,
                           .layout_changed = true,
                           .layout = fmt::format("{} → {} (as metrics.jsonl tells)", ranks_text(ranks.values[i - 1]),
                                                 ranks_text(ranks.values[i])),
                           .note = "run.json has no resume here"});
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
  std::vector<std::pair<std::size_t, std::string>> on_curve;  // marks of the curve as it is so far, and their layouts
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
    while (!on_curve.empty() && found.marks[on_curve.back().first].step >= mark.step) {
      found.marks[on_curve.back().first].on_curve = false;
      on_curve.pop_back();
    }
    const std::string now = json_text(entry, "layout");
    set_layout(mark, on_curve.empty() ? first : on_curve.back().second, now, metrics.ranks);
    mark.changes = changes_of(entry);
    if (is_rollback(run, mark.step)) mark.note = "rolled back to it";
    on_curve.emplace_back(found.marks.size(), now);
    found.marks.push_back(std::move(mark));
  }
  if (unreadable > 0) {
    found.notes.push_back(fmt::format("run.json: {} of \"history\" without an integer \"step\": not marked as a resume",
                                      unreadable == 1 ? "an entry" : fmt::format("{} entries", unreadable)));
  }
  add_unrecorded(found, metrics.ranks);
  return found;
}

}  // namespace phalanx::train
