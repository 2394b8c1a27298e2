// The results of `phalanx bench comm`, and how they are printed: table, CSV, JSON (comm_bench_plot.h draws them).
// Torch-free.
//
// Times are in seconds. p50, p99, the least and the processor time are each the largest of any rank's own; slowest_rank
// is the one with the largest p50. p99 of fewer than 100 calls is the longest of them (percentile()). copy_seconds is
// the copy roofline: the p50 of copying `bytes` from one private buffer to another with memcpy, on all ranks at once;
// copy_share() is copy_seconds / p50, so 0.7 is "70 % of the copy roofline".
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "phalanx/measure/comm_bench_options.h"

namespace phalanx::measure {

struct CommBenchRow {
  CommBenchCase what;
  std::string backend;
  int ranks = 1;
  double p50 = 0, p99 = 0, least = 0;
  double cpu = 0;  // processor time of a rank's whole process for one call: steadier than wall time on a busy machine
  int slowest_rank = 0;
  std::int64_t calls = 0;              // in the round that stands
  int rounds = 0;                      // done: fewer than wanted only where the run was stopped
  std::optional<std::int64_t> wrong;   // elements, on all ranks, that were not what they must be; none: not checked
  std::optional<double> copy_seconds;  // none: not measured
  std::map<std::string, double> baselines;  // p50 of the same case on the peers that took part, by their names

  double algbw() const;  // GB/s
  double busbw() const;
  std::optional<double> copy_share() const;
};

struct CommBenchResult {
  int ranks = 1;
  std::string host, cpu, device;
  int cores = 1;
  bool stopped = false;                // by a signal: what is here is what was done
  std::vector<std::string> baselines;  // other libraries that took part: a column of the table for each
  std::vector<CommBenchRow> rows;
  std::vector<std::string> notes;  // what was left out, and why
};

/// The smallest of the sorted values that `percent` of 100 of them do not exceed (the nearest rank); 0 of none.
double percentile(std::span<const double> sorted, int percent);

std::string table_header(const CommBenchResult& result);  // two lines
std::string table_line(const CommBenchRow& row, const std::vector<std::string>& baselines);
std::string to_csv(const CommBenchResult& result);
std::string to_json(const CommBenchResult& result);

}  // namespace phalanx::measure
