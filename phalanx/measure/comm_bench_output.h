// The results of `phalanx bench comm`, and their output as table, CSV and JSON (comm_bench_plot.h draws them).
// Torch-free.
//
// Times are in seconds. p50, p99, the minimum and the processor time are each the largest value of any rank.
// slowest_rank is the rank with the largest p50. The p99 of fewer than 100 calls is the longest call (percentile()).
// copy_seconds is the copy roofline: the p50 of a memcpy of `bytes` from one private buffer to another, on all ranks at
// once. copy_share() is copy_seconds / p50, so 0.7 means "70 % of the copy roofline".
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
  double cpu = 0;  // processor time of a rank's whole process per call: steadier than wall time on a busy machine
  int slowest_rank = 0;
  std::int64_t calls = 0;                   // in the round that counts
  int rounds = 0;                           // rounds that were done; fewer than requested only if the run was stopped
  std::optional<std::int64_t> wrong;        // number of wrong elements on all ranks; unset: not checked
  std::optional<double> copy_seconds;       // unset: not measured
  std::map<std::string, double> baselines;  // p50 of the same case with each baseline library, by its name

  double algbw() const;  // GB/s
  double busbw() const;
  std::optional<double> copy_share() const;
};

struct CommBenchResult {
  int ranks = 1;
  std::string host, cpu, device;
  int cores = 1;
  bool stopped = false;                // by a signal: the result holds what was done before
  std::vector<std::string> baselines;  // other measured libraries: one column of the table each
  std::vector<CommBenchRow> rows;
  std::vector<std::string> notes;  // what was left out, and why
};

/// The percentile by the nearest-rank method: the smallest value such that `percent` % of the values do not exceed it.
/// 0 if there are no values.
/// REQUIRES: `sorted` is in ascending order.
double percentile(std::span<const double> sorted, int percent);

std::string table_header(const CommBenchResult& result);  // two lines
std::string table_line(const CommBenchRow& row, const std::vector<std::string>& baselines);
std::string to_csv(const CommBenchResult& result);
std::string to_json(const CommBenchResult& result);

}  // namespace phalanx::measure
