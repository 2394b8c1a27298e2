// metrics.jsonl: one JSON object per line, one line per step, for people and for programs that plot.
//
// Each line is written to the system at once. So a reader sees complete lines only, even after a crash. The exception
// is a torn last line, which the next run removes. A resumed run continues the file: it first drops the lines of the
// steps after the one that it resumes from, so no step appears twice.
//
//   observe::MetricsWriter metrics("outputs/metrics.jsonl", {.resumed_step = 40});
//   metrics.write({{"step", 41}, {"loss", 4.13}, {"tps", 6667}});
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
  FileSystem* file_system = nullptr;         // null: the real file system
};

/// Thread-safe.
class MetricsWriter {
 public:
  /// Creates the folder if it is missing.
  explicit MetricsWriter(const std::filesystem::path& path, MetricsOptions options = {});
  ~MetricsWriter();

  /// NaN and infinities are written as null, since JSON has no numbers for them.
  /// REQUIRES: `line` is an object with an integer "step".
  void write(const nlohmann::ordered_json& line);

 private:
  std::filesystem::path path_;
  std::mutex mutex_;
  std::unique_ptr<WritableFile> file_;
};

}  // namespace phalanx::observe
