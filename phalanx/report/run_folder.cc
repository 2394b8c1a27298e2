#include "phalanx/report/run_folder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_depth.h"

namespace phalanx::report {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kExpected =
    "expected the folder of a run, with run.json in it (job.dump_folder of its configuration)";

/// "; runs lie in 'outputs/a', 'outputs/b'", or "" without any.
std::string runs_nearby(const fs::path& folder) {
  std::error_code error;
  std::set<std::string> runs;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (fs::exists(entry.path() / "run.json", error)) runs.insert(fmt::format("'{}'", entry.path().string()));
  }
  const bool has_more = runs.size() > 8;
  while (runs.size() > 8) runs.erase(std::prev(runs.end()));
  return runs.empty() ? "" : fmt::format("; runs lie in {}{}", fmt::join(runs, ", "), has_more ? ", ..." : "");
}

void require_run_folder(const std::string& folder) {
  std::error_code error;
  if (!fs::exists(folder, error)) throw DataError(fmt::format("'{}' does not exist: {}", folder, kExpected));
  if (!fs::is_directory(folder, error)) {
    const fs::path parent = fs::path(folder).parent_path();
    throw DataError(
        fmt::format("'{}' is a file: {}, such as '{}'", folder, kExpected, parent.empty() ? "." : parent.string()));
  }
  if (!fs::exists(fs::path(folder) / "run.json", error)) {
    throw DataError(fmt::format("'{}' holds no run.json: {}{}", folder, kExpected, runs_nearby(folder)));
  }
}

/// Its parts, last first, without "." and an empty last one.
std::vector<std::string> parts_from_the_end(const std::string& folder) {
  std::vector<std::string> parts;
  for (const fs::path& part : fs::path(folder).lexically_normal()) {
    if (!part.empty() && part != ".") parts.push_back(part.string());
  }
  std::ranges::reverse(parts);
  if (parts.empty()) parts.push_back(folder);
  return parts;
}

}  // namespace

std::string RunFolder::loss_unit() const {
  const auto unit = run.find("loss_unit");
  return unit != run.end() && unit->is_string() ? unit->get<std::string>() : kNatsPerToken;
}

std::vector<std::string> RunFolder::notes() const {
  std::vector<std::string> notes = metrics.notes;
  notes.insert(notes.end(), marks.notes.begin(), marks.notes.end());
  if (!has_metrics) notes.emplace_back("it has no metrics.jsonl, so no curves");
  if (has_metrics && metrics.steps.empty()) notes.emplace_back("metrics.jsonl has no training step yet");
  if (metrics.steps.size() == 1) notes.emplace_back("metrics.jsonl has one training step: charts show a single point");
  return notes;
}

RunFolder read_run(const std::string& folder) {
  require_run_folder(folder);
  const std::string path = folder + "/run.json";
  RunFolder run{.folder = folder, .name = folder};
  const std::string text = read_file(path);
  if (is_json_too_deep(text)) throw DataError(fmt::format("'{}': {}", path, kJsonTooDeep));
  run.run = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!run.run.is_object()) {
    throw DataError(fmt::format("'{}' is not a JSON object: was it written by `phalanx train`?", path));
  }
  const std::string metrics = folder + "/metrics.jsonl";
  std::error_code error;
  run.has_metrics = fs::exists(metrics, error);
  if (run.has_metrics) run.metrics = read_metrics(metrics);
  run.marks = run_marks(run.run, run.metrics);
  return run;
}

void name_by_folder(std::vector<RunFolder>& runs) {
  std::vector<std::vector<std::string>> parts;
  std::size_t longest = 1;
  for (const RunFolder& run : runs) {
    parts.push_back(parts_from_the_end(run.folder));
    longest = std::max(longest, parts.back().size());
  }
  for (std::size_t length = 1; length <= longest; ++length) {
    std::set<std::string> names;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      std::vector<std::string> last(parts[i].begin(),
                                    parts[i].begin() + static_cast<std::ptrdiff_t>(std::min(length, parts[i].size())));
      std::ranges::reverse(last);
      runs[i].name = fmt::format("{}", fmt::join(last, "/"));
      names.insert(runs[i].name);
    }
    if (names.size() == runs.size()) return;
  }
}

}  // namespace phalanx::report
