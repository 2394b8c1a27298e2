// Where ranks write their flight recorders (comm/flight_log.h) if nobody has said: on a machine one folder for the
// ranks of a job, so that `phalanx trace analyze` can lay them side by side. The rank that writes first makes it.
// Torch-free.
//
// TraceFolders is the launcher's part: a folder for each attempt, in the folder of its log files where it has one, else
// under $TMPDIR. Ranks are told by kTraceFolderVariable; PHALANX_COMM_TRACE_DIR and a program's own choice come first.
#pragma once

#include <filesystem>
#include <string>

namespace phalanx {

constexpr const char* kTraceFolderVariable = "PHALANX_LAUNCH_TRACE_DIR";

/// $TMPDIR/phalanx_traces_<id> (or under /tmp); an absolute path. It is not made.
std::string temporary_trace_folder(const std::string& id);

class TraceFolders {
 public:
  /// `run_directory`: where the log files go; empty: there are none.
  TraceFolders(std::filesystem::path run_directory, const std::string& run_id);

  void begin_attempt(int attempt) { attempt_ = attempt; }
  std::string folder() const { return of(attempt_).string(); }

  /// What to tell the user after a failure: a line that begins with a line break; empty if no rank of the last attempt
  /// has written anything.
  std::string hint() const;
  /// After a job that has not failed. Ranks that are told to stop write, too (reason: SIGTERM); nobody wants to know.
  /// What was written for another reason stays.
  void remove_stop_dumps() const noexcept;

 private:
  std::filesystem::path of(int attempt) const;
  std::filesystem::path base_;  // of the attempts' folders
  bool among_logs_;
  int attempt_ = 0;
};

}  // namespace phalanx
