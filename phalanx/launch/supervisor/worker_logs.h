// Where the output of ranks goes: the console, files, or both, as torchrun's flags say.
//
//   <directory>/<run id>_<random>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}
//
// - redirects: to the file only. tee: to the file and, with a prefix, to the console. Neither: to the console; rank 0
//   untouched, the lines of others after "[rank] ".
// - A rank that `shown` leaves out is not seen on the console; its files are written all the same.
// - Files need a directory: where none is given a new one under $TMPDIR is made, and kept. Torch-free.
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

/// Which of a rank's streams something is meant for: 0 none, 1 standard output, 2 standard error, 3 both; for all local
/// ranks alike or for each of its own.
struct StreamChoice {
  int all = 0;
  std::map<int, int> by_local_rank;  // others: `all`
  int of(int local_rank) const;
  bool is_empty() const;
  /// "3" or "0:1,1:2" (others then none). Throws UsageError naming `flag`.
  static StreamChoice parse(const std::string& flag, const std::string& text);
};

struct WorkerLogOptions {
  std::string directory;
  StreamChoice redirects, tee;
  std::set<int> shown;  // local ranks; empty: all
  std::string prefix = "[${role_name}${local_rank}]:";
  // Lines of teed streams that hold one of these go into attempt_<n>/filtered_{stdout,stderr}.log too.
  std::vector<std::string> filters[2];
  bool need_directory() const { return !directory.empty() || !redirects.is_empty() || !tee.is_empty(); }
};

/// One stream of one rank: what the child gets, and what is to be pumped meanwhile.
struct WorkerStream {
  std::unique_ptr<OutputRelay> relay;
  UniqueFd file;
  int child_fd() const { return relay ? relay->write_end() : file.get(); }  // -1: inherited
  std::string path;                                                         // of the log file, if any
};

class WorkerLogs {
 public:
  /// Makes the run's directory where one is needed. Throws FileError.
  WorkerLogs(WorkerLogOptions options, const std::string& run_id);

  struct Rank {
    int rank, local_rank;
    std::string role;
  };
  /// Makes the folders and files of an attempt's rank. `stream`: 0 standard output, 1 standard error.
  void begin_attempt(int attempt);
  WorkerStream open(const Rank& rank, int stream);
  /// For TORCHELASTIC_ERROR_FILE; empty where there is no directory.
  std::string error_file(int local_rank) const;
  /// Of this run; empty where none was needed.
  const std::filesystem::path& run_directory() const { return run_directory_; }
  const TraceFolders& traces() const { return *traces_; }
  /// Those consoles that ranks' lines have gone to.
  std::vector<const BackgroundWriter*> consoles() const;

 private:
  WorkerLogOptions options_;
  std::filesystem::path run_directory_, attempt_directory_;
  std::optional<TraceFolders> traces_;
  std::unique_ptr<BackgroundWriter> consoles_[2];
  std::shared_ptr<LineFilter> filters_[2];
};

}  // namespace phalanx
