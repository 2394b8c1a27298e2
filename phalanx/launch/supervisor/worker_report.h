// The reports that a worker leaves for its launcher, beside its exit status. Torch-free.
//
// The launcher gives every worker a private folder in PHALANX_REPORT_DIR. A worker that ends with an error writes the
// error there and prints nothing; the launcher prints the error of the first failing rank once. A worker that handles
// Ctrl-C and SIGTERM by finishing its work (saving a checkpoint) announces how long that may take. Other workers are
// killed soon after the signal.
//
//   catch (const Error& error) {
//     if (!report_error_to_launcher(error)) print(error);
//     return error.exit_status();
//   }
//
// Under torchrun the error also goes into TORCHELASTIC_ERROR_FILE, where torchrun looks for it.
#pragma once

#include <chrono>
#include <exception>
#include <map>
#include <optional>
#include <string>

namespace phalanx {

/// Returns true if a Phalanx launcher will print the error. Otherwise the caller must print it. Never throws.
bool report_error_to_launcher(const std::exception& error) noexcept;

/// Announces that this process ends by itself within `limit` after SIGINT or SIGTERM. Does nothing without a launcher.
void announce_graceful_stop(std::chrono::seconds limit) noexcept;

/// For the launcher: records the rank's process id in the rank's report folder.
void note_started_process(const std::string& directory, int rank, int pid);
/// For a rank: the process ids that its launcher has started on this node so far, by rank. Empty without a launcher.
std::map<int, int> read_started_processes();

struct WorkerReport {
  int rank = -1;
  std::string kind;  // the error's class, "ConfigError"
  std::string message;
  double time_s = 0;    // since the epoch
  int exit_status = 1;  // the exit status that the worker intends
};

/// For the launcher. Returns nullopt if the report is missing or unreadable.
std::optional<WorkerReport> read_worker_report(const std::string& directory);
/// The error that a torch program left in TORCHELASTIC_ERROR_FILE; its time is the time of the file.
std::optional<WorkerReport> read_torch_error_file(const std::string& path);
std::optional<std::chrono::seconds> read_graceful_stop(const std::string& directory);

}  // namespace phalanx
