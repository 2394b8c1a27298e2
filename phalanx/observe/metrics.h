// metrics.jsonl: one JSON object a line, one line a step, for people and
// programs that plot.
//
// Each line is written and handed to the system at once, so a reader (and a
// crash) sees whole lines only, but for a torn last one, which the next run
// removes. A resumed run continues the file: lines of steps after the one it
// resumes from are dropped first, so no step appears twice.
//
//   observe::MetricsWriter metrics("outputs/metrics.jsonl", {.resumed_step =
//   40}); metrics.write({{"step", 41}, {"loss", 4.13}, {"tps", 6667}});
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "phalanx/base/file.h"

namespace phalanx::observe {

struct MetricsOptions {
  std::optional<std::int64_t> resumed_step;  // unset: a new run, which starts an empty file
  FileSystem* file_system = nullptr;         // the real one where null
};

/// Thread-safe.
class MetricsWriter {
 public:
  /// Makes the folder where it is missing.
  explicit MetricsWriter(const std::filesystem::path& path, MetricsOptions options = {});
  ~MetricsWriter();

  /// `line` is an object with an integer "step". Not-a-number and infinities
  /// are written as null, as JSON has none.
  void write(const nlohmann::ordered_json& line);

 private:
  std::filesystem::path path_;
  std::mutex mutex_;
  std::unique_ptr<WritableFile> file_;
};

}  // namespace phalanx::observe
