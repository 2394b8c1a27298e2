#include "phalanx/launch/supervisor/trace_folders.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>
#include <utility>
#include <vector>

#include "phalanx/base/env.h"
#include "phalanx/base/file.h"
#include "phalanx/store/job_secret.h"

namespace phalanx {
namespace {

namespace fs = std::filesystem;

bool has_files(const fs::path& folder) {
  std::error_code error;
  return fs::directory_iterator(folder, error) != fs::directory_iterator();
}

// The text is near the beginning of the file, as flight_log.cc writes it.
bool was_written_at_a_stop(const fs::path& file) {
  return read_file(file).find("\n\"reason\": \"SIGTERM\",\n") != std::string::npos;
}

}  // namespace

std::string temporary_trace_folder(const std::string& id) {
  return (fs::absolute(env_string("TMPDIR").value_or("/tmp")) / ("phalanx_traces_" + id)).string();
}

TraceFolders::TraceFolders(fs::path run_directory, const std::string& run_id)
    : base_(std::move(run_directory)), among_logs_(!base_.empty()) {
  if (among_logs_) return;
  std::string name = run_id;
  std::replace(name.begin(), name.end(), '/', '_');
  base_ = temporary_trace_folder(fmt::format("{}_{}", name, generate_job_secret().substr(0, 16)));
}

fs::path TraceFolders::of(int attempt) const {
  const fs::path folder = base_ / fmt::format("attempt_{}", attempt);
  return among_logs_ ? folder / "comm_traces" : folder;
}

std::string TraceFolders::hint() const {
  if (!has_files(of(attempt_))) return "";
  return fmt::format("\nthe last operations of this node's ranks: phalanx trace analyze {}", folder());
}

void TraceFolders::remove_stop_dumps() const noexcept {
  std::error_code ignored;
  for (int attempt = 0; attempt <= attempt_; ++attempt) {
    try {
      std::vector<fs::path> files;
      for (const auto& entry : fs::directory_iterator(of(attempt), ignored)) files.push_back(entry.path());
      if (std::all_of(files.begin(), files.end(), was_written_at_a_stop))
        for (const fs::path& file : files) fs::remove(file, ignored);
    } catch (const std::exception&) {
      // Files that cannot be read stay, for the user.
    }
    fs::remove(of(attempt), ignored);  // works only if it is empty
  }
  if (!among_logs_) fs::remove(base_, ignored);
}

}  // namespace phalanx
