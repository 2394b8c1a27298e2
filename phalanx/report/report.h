// Writes the report of a run, or of several runs side by side: one HTML file that needs
// neither network nor other files.
//
// It is made from the files in the run's folder (job.dump_folder). So it can be made at any time, also of a run that is
// still going or was killed:
//   run.json       how it was started: configuration, model, environment, status, resumes (run_marks.h);
//                  "sample": {"prompt", "text"}
//   metrics.jsonl  a line per step: {"step", "loss", "grad_norm", "lr", "tps", "memory_gib": [per rank], ...} and per
//                  validation: {"step", "validation_loss", ...}
// If a run was resumed and a step has two lines, the later line counts.
// Keys that a version of Phalanx does not write may be missing.
//
//   std::string path = write_report("outputs");   // outputs/report.html
//   write_comparison({"outputs/a", "outputs/b"}, "comparison.html");
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace phalanx::report {

constexpr std::size_t kMaxRunsOfReport = 16;

/// Throws DataError if the folder holds no run or its files cannot be read.
std::string render_report(const std::string& run_folder);
/// Writes report.html into the folder and returns its path.
std::string write_report(const std::string& run_folder);

/// Throws the same, and UsageError if there are more than kMaxRunsOfReport folders or one is named twice.
/// One folder makes the page of its run. REQUIRES: at least one folder.
std::string render_comparison(const std::vector<std::string>& run_folders);
void write_comparison(const std::vector<std::string>& run_folders, const std::string& path);

}  // namespace phalanx::report
