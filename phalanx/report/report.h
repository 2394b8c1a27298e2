// Writes the report of a run: one HTML file that needs neither network nor other files.
//
// It is made from the files in the run's folder (job.dump_folder). So it can be made at any time, also of a run that is
// still going or was killed:
//   run.json       how it was started: configuration, model, environment, status; "sample": {"prompt", "text"}
//   metrics.jsonl  a line per step: {"step", "loss", "grad_norm", "lr", "tps", "memory_gib": [per rank], ...} and per
//                  validation: {"step", "validation_loss", ...}
// If a run was resumed and a step has two lines, the later line counts.
//
//   std::string path = write_report("outputs");   // outputs/report.html
#pragma once

#include <string>

namespace phalanx::train {

/// Throws DataError if the folder holds no run or its files cannot be read.
std::string render_report(const std::string& run_folder);
/// Writes report.html into the folder and returns its path.
std::string write_report(const std::string& run_folder);

}  // namespace phalanx::train
