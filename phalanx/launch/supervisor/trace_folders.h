// Where ranks write their flight recorders (comm/flight_log.h) if the user gives no folder. The ranks of a job share
// one folder per machine, so that `phalanx trace analyze` can compare their files. The rank that writes first creates
// it. Torch-free.
//
// TraceFolders is the launcher's side: one folder per attempt, inside the folder of the log files if there is one, else
// under $TMPDIR. Ranks read it from the variable kTraceFolderVariable. PHALANX_COMM_TRACE_DIR and a folder that the
// program chooses come first.
#pragma once

#include <filesystem>
#include <string>

namespace phalanx {

constexpr const char* kTraceFolderVariable = "PHALANX_LAUNCH_TRACE_DIR";

/// $TMPDIR/phalanx_traces_<id> (or under /tmp), as an absolute path. The folder is not created.
std::string temporary_trace_folder(const std::string& id);

class TraceFolders {
 public:
  /// `run_directory`: the folder of the log files; empty: there are none.
  TraceFolders(std::filesystem::path run_directory, const std::string& run_id);

  void begin_attempt(int attempt) { attempt_ = attempt; }
  std::string folder() const { return of(attempt_).string(); }

  /// A hint for the user after a failure: a line that begins with a line break. Empty if no rank of the last attempt
  /// has written a file.
  std::string hint() const;
  /// For a job that has not failed: removes the files that ranks wrote only because they were stopped (reason:
  /// SIGTERM). Files with another reason stay.
  void remove_stop_dumps() const noexcept;

 private:
  std::filesystem::path of(int attempt) const;
  std::filesystem::path base_;  // of the attempts' folders
  bool among_logs_;
  int attempt_ = 0;
};

}  // namespace phalanx
