#include "cli/front/report_command.h"

#include <fmt/format.h>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/report/report.h"

namespace phalanx::cli {

const std::string_view kReportHelp = R"(usage: phalanx report RUN_FOLDER

Writes RUN_FOLDER/report.html: loss, learning rate, throughput, gradient norm, memory per rank, sample, environment and
configuration of a run, in one file that needs no network. A run writes it by itself at its end; this command makes it
of a run that is still going or was killed. RUN_FOLDER is the run's job.dump_folder.

  phalanx report outputs
)";

int report_command(const Arguments& arguments) {
  std::string folder;
  CLI::App app;
  app.add_option("folder", folder);
  parse_options(app, arguments);
  if (folder.empty()) throw UsageError("expected the run's folder (job.dump_folder of its configuration)");
  fmt::print("{}\n", train::write_report(folder));
  return 0;
}

}  // namespace phalanx::cli
