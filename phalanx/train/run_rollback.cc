#include "phalanx/train/run_rollback.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"

namespace phalanx::train {
namespace {

/// Stores the metrics beside the steps that were set aside, before the run's own metrics are cut back. The file is
/// written completely or not at all; after an interruption it is written again.
void keep_curve(const std::filesystem::path& run_folder, const std::filesystem::path& into, FileSystem& fs) {
  const auto metrics = run_folder / "metrics.jsonl";
  std::error_code error;
  if (!std::filesystem::exists(metrics, error)) return;
  try {
    replace_file(into / "metrics.jsonl", read_file(metrics), fs);
  } catch (const FileError& failure) {
    log::warn_once(fmt::format("cannot copy {} to {}: {}", metrics.string(), into.string(), failure.what()));
  }
}

/// Records the rollback once, even if an interruption makes this run twice.
void record(const std::filesystem::path& run_folder, const std::filesystem::path& into, const Branch& branch,
            bool interrupted, FileSystem& fs) {
  const auto path = run_folder / "run.json";
  std::error_code error;
  nlohmann::json run = nlohmann::json::object();
  if (std::filesystem::exists(path, error)) {
    const auto before = nlohmann::json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
    if (before.is_object()) run = before;
  }
  nlohmann::json entry = {
      {"step", branch.step}, {"set_aside", branch.being_set_aside}, {"into", into.string()}, {"time", branch.time}};
  if (interrupted) entry["interrupted"] = true;
  nlohmann::json& branches = run["branches"];
  if (!branches.is_array()) branches = nlohmann::json::array();
  const bool is_there = !branches.empty() && branches.back().is_object() &&
                        branches.back().value("time", nlohmann::json()) == branch.time &&
                        branches.back().value("into", nlohmann::json()) == into.string();
  if (is_there) {
    branches.back() = std::move(entry);
  } else {
    branches.push_back(std::move(entry));
  }
  replace_file(path, run.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n", fs);
}

KeepBeside keeper(const RollbackFolders& folders, bool interrupted, FileSystem& fs) {
  return [&folders, interrupted, &fs](const std::filesystem::path& into, const Branch& branch) {
    keep_curve(folders.run, into, fs);
    record(folders.run, into, branch, interrupted, fs);
  };
}

}  // namespace

SetAside roll_back(const RollbackFolders& folders, Branch branch, FileSystem& fs) {
  return begin_branch(folders.checkpoints, std::move(branch), fs, keeper(folders, /*interrupted=*/false, fs));
}

std::optional<SetAside> finish_rollback(const RollbackFolders& folders, FileSystem& fs) {
  SetAside left = finish_branch(folders.checkpoints, fs, keeper(folders, /*interrupted=*/true, fs));
  if (left.names.empty()) return std::nullopt;
  return left;
}

}  // namespace phalanx::train
