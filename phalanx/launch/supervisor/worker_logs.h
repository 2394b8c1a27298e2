// WorkerLogs: where the output of ranks goes (the console, files, or both), with torchrun's flags.
//
//   <directory>/<run id>_<random>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}
//
// - redirects: to the file only. tee: to the file and, with a prefix, to the console. Neither: to the console; the
//   output of rank 0 is unchanged, and the lines of other ranks begin with "[rank] ".
// - A rank that is not in `shown` does not appear on the console. Its files are written all the same.
// - Files need a directory. If none is given, a new one is created under $TMPDIR; it is not removed. Torch-free.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "phalanx/launch/supervisor/background_writer.h"
#include "phalanx/launch/supervisor/output_relay.h"
#include "phalanx/launch/supervisor/trace_folders.h"

namespace phalanx {

/// A choice of a rank's streams: 0 none, 1 standard output, 2 standard error, 3 both. It is the same for all local
/// ranks, or differs by local rank.
struct StreamChoice {
  int all = 0;
  std::map<int, int> by_local_rank;  // other local ranks: `all`
  int of(int local_rank) const;
  bool is_empty() const;
  /// Parses "3" or "0:1,1:2" (other local ranks: none). Throws UsageError; the error names `flag`.
  static StreamChoice parse(const std::string& flag, const std::string& text);
};

struct WorkerLogOptions {
  std::string directory;
  StreamChoice redirects, tee;
  std::set<int> shown;  // local ranks; empty: all
  std::string prefix = "[${role_name}${local_rank}]:";
  // Lines of teed streams that contain one of these also go into attempt_<n>/filtered_{stdout,stderr}.log.
  std::vector<std::string> filters[2];
  bool need_directory() const { return !directory.empty() || !redirects.is_empty() || !tee.is_empty(); }
};

/// One stream of one rank: the child's file descriptor, and the relay that must be pumped while the child runs.
struct WorkerStream {
  std::unique_ptr<OutputRelay> relay;
  UniqueFd file;
  int child_fd() const { return relay ? relay->write_end() : file.get(); }  // -1: inherited
  std::string path;                                                         // of the log file, if any
};

class WorkerLogs {
 public:
  /// Creates the run's directory if one is needed. Throws FileError.
  WorkerLogs(WorkerLogOptions options, const std::string& run_id);

  struct Rank {
    int rank, local_rank;
    std::string role;
  };
  void begin_attempt(int attempt);
  /// Creates the folders and files of a rank in the current attempt. `stream`: 0 standard output, 1 standard error.
  WorkerStream open(const Rank& rank, int stream);
  /// The path for TORCHELASTIC_ERROR_FILE; empty if there is no directory.
  std::string error_file(int local_rank) const;
  /// The directory of this run; empty if none was needed.
  const std::filesystem::path& run_directory() const { return run_directory_; }
  const TraceFolders& traces() const { return *traces_; }
  /// The consoles that lines of ranks were written to.
  std::vector<const BackgroundWriter*> consoles() const;

 private:
  WorkerLogOptions options_;
  std::filesystem::path run_directory_, attempt_directory_;
  std::optional<TraceFolders> traces_;
  std::unique_ptr<BackgroundWriter> consoles_[2];
  std::shared_ptr<LineFilter> filters_[2];
};

}  // namespace phalanx
