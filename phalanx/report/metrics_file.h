// Reads the metrics.jsonl of a run into curves.
//
// The file is read line by line. A step takes some 300 bytes of memory, and 20 for each rank.
//
//   const MetricsFile metrics = read_metrics("outputs/metrics.jsonl");
//   metrics.curve("loss").values.back();
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx::report {

/// A value by step, by rising steps. NaN is a value that the file holds as null, NaN or an infinity.
struct Curve {
  std::vector<std::int64_t> steps;
  std::vector<double> values;

  bool empty() const noexcept { return steps.empty(); }
  void add(std::int64_t step, double value);
};

/// The keys of a training step that become curves.
const std::vector<std::string_view>& curve_keys();

constexpr std::size_t kRanksShown = 8;

struct MetricsFile {
  std::vector<std::int64_t> steps;  // of training, rising
  /// The memory of each rank; empty above kRanksShown ranks.
  std::vector<Curve> memory_by_rank;
  Curve memory_highest, memory_lowest;  // over the ranks
  Curve ranks;                          // how many ranks wrote their memory
  Curve validation_loss;
  std::vector<std::string> notes;  // for people: what was left out, and why

  /// Of the training steps that have the key; empty for another key.
  const Curve& curve(std::string_view key) const;

  /// In the order of curve_keys().
  std::vector<Curve> curves = std::vector<Curve>(curve_keys().size());
};

/// If a step has two lines, the later one counts. An incomplete last line is left out, since a run may be writing it;
/// so is a value of another type. Both are noted. Throws DataError that names the line if any other line is not a JSON
/// object with an integer "step", or if the file cannot be read.
MetricsFile read_metrics(const std::string& path);

}  // namespace phalanx::report
