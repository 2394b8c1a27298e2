// A run as the report sees it: what is read from its folder.
//
//   const RunFolder run = read_run("outputs");
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/report/metrics_file.h"
#include "phalanx/report/run_marks.h"

namespace phalanx::report {

/// Units of a loss, in "loss_unit" of run.json.
inline constexpr const char* kNatsPerToken = "nats per token";
inline constexpr const char* kNatsPerPair = "nats per pair";  // of a chosen and a rejected answer ([dpo])

struct RunFolder {
  std::string folder;
  std::string name;         // for legends
  nlohmann::json run;       // run.json, an object
  bool has_metrics = true;  // there is a metrics.jsonl
  MetricsFile metrics;
  RunMarks marks;

  /// kNatsPerToken where run.json names none.
  std::string loss_unit() const;

  /// What the page has to say about the files: what was left out, and that there are no steps.
  std::vector<std::string> notes() const;
};

/// Throws DataError that says what lies at `folder` instead of a run, and where runs are nearby. A run may have no
/// metrics.jsonl.
RunFolder read_run(const std::string& folder);

/// Names each run after its folder, as short as they differ: "a" and "b" of outputs/a and outputs/b.
void name_by_folder(std::vector<RunFolder>& runs);

}  // namespace phalanx::report
