#include "phalanx/launch/supervisor/worker_failure.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <string_view>
#include <tuple>
#include <utility>

#include "phalanx/base/start_thread.h"

namespace phalanx {
namespace {

constexpr std::size_t kTableRows = 16;  // a job of a thousand ranks may have a thousand failures
constexpr std::size_t kErrorColumn = 100;

std::string how_it_ended(const WorkerFailure& failure) {
  return failure.signal != 0 ? signal_text(failure.signal) : fmt::format("exit status {}", failure.exit_status);
}

std::string first_line_of(const std::string& text) {
  std::string line = text.substr(0, text.find('\n'));
  if (line.size() > kErrorColumn) line = line.substr(0, kErrorColumn - 3) + "...";
  return line;
}

// "rank 3", "ranks 0, 2 to 7, 9".
std::string rank_list(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (last == i + 1) last = i;  // two ranks are not written as a range
    if (i > 0) text += ", ";
    text += last == i ? std::to_string(ranks[i]) : fmt::format("{} to {}", ranks[i], ranks[last]);
    i = last + 1;
  }
  return text;
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
    if (failure.signal == SIGKILL) text += "; if nobody did that, the node may be short of memory";
    if (failure.signal == SIGBUS) {
      text +=
          "; a file that it reads in place, such as token data or weights, was cut short while it ran, or /dev/shm is "
          "full";
    }
  } else {
    text = fmt::format("rank {} (host {}) ended with {}", failure.rank, failure.host, how_it_ended(failure));
    if (failure.exit_status == 127) {  // the exit status of the shell and the dynamic linker
      const std::string limits = memory_limits_text();
      text += fmt::format("; the program, or a library that it needs, could not be loaded{}{}",
                          limits.empty() ? "" : ": ", limits);
    }
  }
  if (!failure.log_file.empty()) text += fmt::format("\nits standard error: {}", failure.log_file);
  return text;
}

std::string failure_report(std::vector<WorkerFailure> failures) {
  std::sort(failures.begin(), failures.end(), precedes);
  std::string report = describe(failures.front());
  // An error that several ranks share is reported once.
  const WorkerFailure cause = failures.front();
  failures.erase(failures.begin());
  std::vector<int> sharing;
  std::erase_if(failures, [&](const WorkerFailure& other) {
    const bool same = other.rank >= 0 && !cause.message.empty() && other.message == cause.message &&
                      other.exit_status == cause.exit_status && other.signal == cause.signal;
    if (same) sharing.push_back(other.rank);
    return same;
  });
  if (!sharing.empty()) report += "\nthe same on " + rank_list(std::move(sharing));
  if (failures.empty()) return report;
  using Row = std::array<std::string, 7>;
  std::vector<Row> rows{{"rank", "host", "local rank", "pid", "after", "ended with", "error"}};
  for (std::size_t i = 0; i < failures.size() && i < kTableRows; ++i) {
    const WorkerFailure& failure = failures[i];
    const double after = failure.time_s - cause.time_s;
    if (failure.rank < 0)
      rows.push_back(
          {"-", failure.host, "-", "-", fmt::format("{:+.3f} s", after), "", first_line_of(failure.message)});
    else
      rows.push_back({std::to_string(failure.rank), failure.host, std::to_string(failure.local_rank),
                      std::to_string(failure.pid), fmt::format("{:+.3f} s", after), how_it_ended(failure),
                      first_line_of(failure.message)});
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
  if (failures.size() > kTableRows) report += fmt::format("\n  and {} more", failures.size() - kTableRows);
  return report;
}

int launcher_exit_status(const WorkerFailure& root_cause) {
  if (root_cause.signal != 0) return 128 + root_cause.signal;
  return root_cause.exit_status == 2 ? 2 : 1;
}

}  // namespace phalanx
