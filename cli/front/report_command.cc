#include "cli/front/report_command.h"

#include <fmt/format.h>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/report/report.h"

namespace phalanx::cli {

const std::string_view kReportHelp = R"(usage: phalanx report RUN_FOLDER [RUN_FOLDER...] [--output FILE]

Writes the report of a run: charts of loss, learning rate, gradient norm, throughput and memory per rank, with marks
where it was resumed and where its layout changed; sample, environment and configuration. It is one HTML file that needs
no network. A run writes it by itself at its end; this command makes it of a run that is still going or was killed.
RUN_FOLDER is the run's job.dump_folder.

Several folders (up to 16) make one page that compares the runs: a colour for each of them, and tables of the
configuration keys that differ.

  --output FILE   where to write it; default: RUN_FOLDER/report.html, or comparison.html here for several runs

  phalanx report outputs
  phalanx report outputs/a outputs/b --output a_and_b.html
)";

int report_command(const Arguments& arguments) {
  std::vector<std::string> folders;
  std::optional<std::string> output;
  CLI::App app;
  app.add_option("folders", folders);
  app.add_option("--output", output);
  parse_options(app, arguments);
  if (folders.empty()) throw UsageError("expected the run's folder (job.dump_folder of its configuration)");
  if (folders.size() == 1 && !output) {
    fmt::print("{}\n", report::write_report(folders[0]));
    return 0;
  }
  if (output && output->empty()) throw UsageError("--output is empty: expected the path of a file");
  const std::string path = output.value_or("comparison.html");
  report::write_comparison(folders, path);
  fmt::print("{}\n", path);
  return 0;
}

}  // namespace phalanx::cli
