// Where a run was resumed, and where its layout changed, as its run.json tells:
//
//   "begun":    {"layout": "2 ranks, data parallel", "time": 1764093600.0}
//   "history":  [{"step": 150, "layout": "1 rank", "time": ..., "changes": [{"key", "saved", "now"}, ...]}, ...]
//   "branches": [{"step": 150, ...}, ...]     rollbacks
//
// Older files lack "begun" and the layouts. For them the number of ranks that wrote their memory into metrics.jsonl
// tells a change.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "phalanx/report/metrics_file.h"

namespace phalanx::report {

struct RunMark {
  std::int64_t step = 0;  // the last one before
  double time = 0;        // seconds since the epoch; 0: unknown
  bool resumed = true;    // false: only the number of ranks tells that something changed
  bool on_curve = true;   // false: the run later went back to an earlier step, so the curve does not have this resume
  bool layout_changed = false;
  std::string layout;                // "2 ranks, data parallel → 1 rank", "1 rank, as before"; empty: unknown
  std::vector<std::string> changes;  // "[optimizer] lr: 0.002 → 0.001"
  std::string note;                  // "rolled back"

  std::string text() const;  // in one line
};

struct RunMarks {
  std::vector<RunMark> marks;      // in the order of time; those that run.json does not have come last
  std::vector<std::string> notes;  // what of run.json could not be read
};

RunMarks run_marks(const nlohmann::json& run, const MetricsFile& metrics);

}  // namespace phalanx::report
