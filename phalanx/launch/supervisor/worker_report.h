// What a worker tells its launcher beside its exit status. Torch-free.
//
// The launcher gives every worker a private folder in PHALANX_REPORT_DIR. A worker that ends with an error writes it
// there and stays silent: the launcher prints the first failing rank's once. A worker that handles Ctrl-C and SIGTERM
// by finishing its work (saving a checkpoint) announces how long that may take; others are killed soon after the
// signal.
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

/// True if a Phalanx launcher will print it. Never throws: an error that cannot be reported is the caller's to print.
bool report_error_to_launcher(const std::exception& error) noexcept;

/// From now on this process ends by itself on SIGINT and SIGTERM, within `limit`. Nothing happens without a launcher.
void announce_graceful_stop(std::chrono::seconds limit) noexcept;

/// By the launcher, into the folder that it gives a rank: which process that is.
void note_started_process(const std::string& directory, int rank, int pid);
/// By a rank: those that its launcher has started beside it so far, by rank. Empty without a launcher.
std::map<int, int> read_started_processes();

struct WorkerReport {
  int rank = -1;
  std::string kind;  // the error's class, "ConfigError"
  std::string message;
  double time_s = 0;    // since the epoch
  int exit_status = 1;  // what the worker means to end with
};

/// The launcher's side. A missing or unreadable report is nullopt.
std::optional<WorkerReport> read_worker_report(const std::string& directory);
/// What a program of torch's left in TORCHELASTIC_ERROR_FILE; its time is the file's.
std::optional<WorkerReport> read_torch_error_file(const std::string& path);
std::optional<std::chrono::seconds> read_graceful_stop(const std::string& directory);

}  // namespace phalanx
