#include "cli/front/report_command.h"

#include <fmt/format.h>

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
  if (arguments.empty()) throw UsageError("expected the run's folder (job.dump_folder of its configuration)");
  refuse_rest({arguments.begin() + 1, arguments.end()}, "report");
  fmt::print("{}\n", train::write_report(arguments[0]));
  return 0;
}

}  // namespace phalanx::cli
