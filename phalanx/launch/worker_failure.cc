#include "phalanx/launch/worker_failure.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <string_view>
#include <tuple>

namespace phalanx {
namespace {

constexpr std::size_t kTableRows = 16;  // a job of a thousand ranks fails a thousand times
constexpr std::size_t kErrorColumn = 100;

std::string how_it_ended(const WorkerFailure& failure) {
  return failure.signal != 0 ? signal_text(failure.signal) : fmt::format("exit status {}", failure.exit_status);
}

std::string first_line_of(const std::string& text) {
  std::string line = text.substr(0, text.find('\n'));
  if (line.size() > kErrorColumn) line = line.substr(0, kErrorColumn - 3) + "...";
  return line;
}

}  // namespace

std::string signal_text(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? fmt::format("signal {} (SIG{})", signal, name) : fmt::format("signal {}", signal);
}

bool precedes(const WorkerFailure& a, const WorkerFailure& b) {
  return std::make_tuple(a.is_secondary(), a.time_s, a.rank) < std::make_tuple(b.is_secondary(), b.time_s, b.rank);
}

std::string describe(const WorkerFailure& failure) {
  if (failure.rank < 0) return failure.message;
  std::string text;
  if (!failure.message.empty()) {
    const std::string ended = failure.signal != 0 ? "killed by " + how_it_ended(failure) : how_it_ended(failure);
    text = fmt::format("rank {} (host {}, {}): {}", failure.rank, failure.host, ended, failure.message);
  } else if (failure.signal != 0) {
    text = fmt::format("rank {} (host {}) was killed by {}", failure.rank, failure.host, how_it_ended(failure));
    if (failure.signal == SIGKILL) text += "; if nobody did that, the machine may be short of memory";
  } else {
    text = fmt::format("rank {} (host {}) ended with {}", failure.rank, failure.host, how_it_ended(failure));
  }
  if (!failure.log_file.empty()) text += fmt::format("\nits standard error: {}", failure.log_file);
  return text;
}

std::string failure_report(std::vector<WorkerFailure> failures) {
  std::sort(failures.begin(), failures.end(), precedes);
  std::string report = describe(failures.front());
  if (failures.size() == 1) return report;
  using Row = std::array<std::string, 7>;
  std::vector<Row> rows{{"rank", "host", "local rank", "pid", "after", "ended with", "error"}};
  for (std::size_t i = 1; i < failures.size() && i <= kTableRows; ++i) {
    const WorkerFailure& failure = failures[i];
    const double after = failure.time_s - failures.front().time_s;
    const bool said_above = !failure.message.empty() && failure.message == failures.front().message;
    if (failure.rank < 0)
      rows.push_back(
          {"-", failure.host, "-", "-", fmt::format("{:+.3f} s", after), "", first_line_of(failure.message)});
    else
      rows.push_back({std::to_string(failure.rank), failure.host, std::to_string(failure.local_rank),
                      std::to_string(failure.pid), fmt::format("{:+.3f} s", after), how_it_ended(failure),
                      said_above ? "the same" : first_line_of(failure.message)});
  }
  Row::size_type columns = rows.front().size();
  std::vector<std::size_t> widths(columns, 0);
  for (const Row& row : rows)
    for (std::size_t column = 0; column < columns; ++column)
      widths[column] = std::max(widths[column], row[column].size());
  report += "\nother failures:";
  for (const Row& row : rows) {
    std::string line = " ";
    for (std::size_t column = 0; column < columns; ++column)
      line += fmt::format(" {:<{}} ", row[column], widths[column]);
    line.erase(line.find_last_not_of(' ') + 1);
    report += "\n" + line;
  }
  if (failures.size() - 1 > kTableRows) report += fmt::format("\n  and {} more", failures.size() - 1 - kTableRows);
  return report;
}

int launcher_exit_status(const WorkerFailure& root_cause) {
  if (root_cause.signal != 0) return 128 + root_cause.signal;
  return root_cause.exit_status == 2 ? 2 : 1;
}

}  // namespace phalanx
