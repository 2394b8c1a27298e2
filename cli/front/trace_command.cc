#include "cli/front/trace_command.h"

#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "cli/front/executed_timeline.h"
#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/base/parse_text.h"
#include "phalanx/base/signals.h"
#include "phalanx/observe/flight_analysis.h"

namespace phalanx::cli {

const std::string_view kTraceHelp = R"(usage: phalanx trace analyze FOLDER
       phalanx trace dump PID

dump has a job that runs write its flight recorders: PID is that of `phalanx train -n` or `phalanx launch`, which asks
all its ranks, or of one rank. It is the same as SIGQUIT, but refused where that would end the process. The ranks log
where they write.

analyze reads the flight recorder files that the ranks of a job left in FOLDER (after an error, a time-out, or dump) and
says in one sentence which rank is at which operation, and who is missing or at odds with the others; then a table for
each group of ranks, and why the files were written. In training FOLDER is comm.save_traces_folder in job.dump_folder;
the run's folder stands for its comm_traces.

  phalanx trace dump PID_OF_PHALANX_LAUNCH          a job that hangs: have all ranks of the node write
  phalanx trace analyze outputs/comm_traces

Without a folder of their own (PHALANX_COMM_TRACE_DIR names one) ranks write into attempt_N/comm_traces of --log-dir,
else into a folder under $TMPDIR, or /tmp, and log which. The files of several nodes go into one folder to be read
together.

A folder of traces (profile_traces/iteration_N, written with --profiling.enable_profiling) of ranks that are a pipeline:
when each of its passes ran, beside the simulation of the schedule, as phalanx schedule --executed FOLDER tells it.

The status is 0 if every rank's file could be read, 1 if one is missing or malformed.
)";

namespace {

bool holds_traces(const std::filesystem::path& folder) {
  std::error_code error;
  for (const auto& one : std::filesystem::directory_iterator(folder, error)) {
    if (one.path().filename().string().ends_with("_trace.json")) return true;
  }
  return false;
}

/// Resolves a run's folder to the files that its ranks wrote below it.
std::string recordings_of(const std::string& folder) {
  std::error_code error;
  const auto run = std::filesystem::path(folder);
  if (!std::filesystem::exists(run / "run.json", error)) return folder;
  const auto below = run / "comm_traces";
  if (std::filesystem::is_directory(below, error) && !std::filesystem::is_empty(below, error)) return below.string();
  throw Error(
      fmt::format("{} is a run's folder, and its ranks have left no flight recorder files in {} (they do after an "
                  "error, a time-out, "
                  "or when asked to); expected the folder of [comm] save_traces_folder, or one of the traces' in {}",
                  folder, below.string(), (run / "profile_traces").string()));
}

int dump(const std::string& text) {
  const pid_t process = parse_whole<pid_t>(text).value_or(0);
  if (process < 1) {
    throw UsageError(
        fmt::format("dump: '{}' is no process: expected the number of a launcher or a rank, such as "
                    "phalanx trace dump 4711",
                    text));
  }
  if (::kill(process, 0) != 0) {
    throw Error(fmt::format("dump: process {}: {}", process,
                            errno == ESRCH ? "there is none of that number" : std::strerror(errno)));
  }
  if (!handles_signal(process, SIGQUIT)) {
    throw Error(
        fmt::format("dump: process {} does not handle SIGQUIT, which would end it: it is no launcher and "
                    "no rank of Phalanx, or has not finished its rendezvous yet",
                    process));
  }
  if (ignores_signal(process, SIGQUIT)) {
    throw Error(fmt::format("dump: process {} ignores SIGQUIT: it is no launcher and no rank of Phalanx", process));
  }
  if (::kill(process, SIGQUIT) != 0) {
    throw Error(fmt::format("dump: process {}: {}", process, std::strerror(errno)));
  }
  fmt::print("process {} was asked; the ranks log where they write\n", process);
  return 0;
}

int analyze(const std::string& folder) {
  if (folder.empty()) throw UsageError("expected the folder that holds the flight recorder files or the traces");

  if (holds_traces(folder)) {
    print_executed(executed_step(observe::read_trace_files(folder)));
    return 0;
  }
  const std::string recordings = recordings_of(folder);
  const observe::FlightAnalysis analysis = observe::analyze_flight_files(observe::read_flight_files(recordings));
  fmt::print("{}", observe::to_text(analysis));
  if (!analysis.ranks_without_file.empty()) {
    std::fflush(stdout);
    throw Error(fmt::format(
        "{} of the job left no file in {}: crashed, killed, or not asked to write one (phalanx trace dump PID)",
        observe::ranks_text(analysis.ranks_without_file), recordings));
  }
  return 0;
}

}  // namespace

int trace_command(const Arguments& arguments) {
  std::string folder, process;
  CLI::App app;
  app.add_subcommand("analyze")->alias("analyse")->add_option("FOLDER", folder);
  app.add_subcommand("dump")->add_option("PID", process);
  Arguments words = arguments;
  CLI::App& chosen = take_subcommand(app, words);
  parse_options(chosen, words);
  return chosen.get_name() == "dump" ? dump(process) : analyze(folder);
}

}  // namespace phalanx::cli
