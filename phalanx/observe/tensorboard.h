// TensorBoard event files: scalars and text of a run, for `tensorboard --logdir`.
//
// The file is a sequence of TFRecords, each a protobuf message of type Event. A run starts a new file beside the
// existing ones. Its first event makes TensorBoard discard points of the older files: a resumed run those of later
// steps, a new run all. TensorBoard reads files in the order of their names. So the seconds in the name are larger than
// those of every existing file.
//
//   observe::TensorBoardWriter board("outputs/tb", {.resumed_step = 40});
//   board.add_scalar("loss_metrics/global_avg_loss", 4.13, /*step=*/41);
//   board.add_text("config", "```toml\n...\n```", 0);
//   board.flush();
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "phalanx/base/file.h"

namespace phalanx::observe {

struct TensorBoardOptions {
  std::optional<std::int64_t> resumed_step;
  FileSystem* file_system = nullptr;  // null: the real file system
};

/// Thread-safe.
class TensorBoardWriter {
 public:
  /// Creates the folder if it is missing, and the file events.out.tfevents.<seconds>.<host>.<pid>.<n> in it.
  explicit TensorBoardWriter(const std::filesystem::path& folder, TensorBoardOptions options = {});
  ~TensorBoardWriter();  // flushes, but errors are lost: call flush() first

  void add_scalar(std::string_view tag, double value, std::int64_t step);
  void add_text(std::string_view tag, std::string_view markdown, std::int64_t step);
  /// Writes the added events to the system. This also happens automatically at 64 KiB.
  void flush();

  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  void add_event(std::string_view event);

  std::filesystem::path path_;
  std::mutex mutex_;
  std::unique_ptr<WritableFile> file_;
  std::string pending_;
};

}  // namespace phalanx::observe
