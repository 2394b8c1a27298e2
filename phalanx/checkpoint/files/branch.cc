#include "phalanx/checkpoint/files/branch.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/json_text.h"
#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/files/manifest.h"

namespace phalanx {
namespace {

constexpr int kBranchFormat = 1;
constexpr std::string_view kAbandoned = "abandoned-";

std::string branch_text(const Branch& branch) {
  const nlohmann::json json = {{"format", kBranchFormat},
                               {"step", branch.step},
                               {"time", branch.time},
                               {"command", branch.command},
                               {"job", branch.job},
                               {"last_command", branch.last_command},
                               {"last_job", branch.last_job},
                               {"base", branch.base},
                               {"set_aside_in", branch.set_aside_in},
                               {"being_set_aside", branch.being_set_aside}};
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string base_of(const std::filesystem::path& step) { return hash_of_text(read_file(step / kManifestName)); }

bool branch_entry_exists(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

/// The first name that does not exist, or that an interruption has left empty.
std::string free_name(const std::filesystem::path& folder) {
  for (int number = 1;; ++number) {
    std::string name = fmt::format("{}{}", kAbandoned, number);
    std::error_code error;
    if (!branch_entry_exists(folder / name) || std::filesystem::is_empty(folder / name, error)) return name;
  }
}

/// Moves what branch.json names, and records there that it is done.
SetAside move_aside(const std::filesystem::path& folder, Branch branch, FileSystem& fs, const KeepBeside& keep) {
  SetAside moved{.names = branch.being_set_aside, .into = folder / branch.set_aside_in};
  for (const auto& name : moved.names) {
    if (!branch_entry_exists(folder / name)) continue;  // moved before an interruption
    fs.rename(folder / name, moved.into / name);
  }
  if (keep) keep(moved.into, branch);
  fs.sync_directory(moved.into);
  fs.sync_directory(folder);
  branch.being_set_aside.clear();
  replace_file(folder / kBranchName, branch_text(branch), fs);
  return moved;
}

}  // namespace

std::optional<Branch> read_branch(const std::filesystem::path& folder) {
  const auto path = folder / kBranchName;
  if (!branch_entry_exists(path)) return std::nullopt;
  constexpr const char* kAdvice = "remove the file to go on with the newest step beside it";
  const auto json = [&] {
    try {
      return parse_json_object<CheckpointError>(read_file(path), path.string());
    } catch (const CheckpointError& error) {
      throw CheckpointError(fmt::format("{}: {}", error.what(), kAdvice));
    }
  }();
  Branch branch;
  const auto text = [&](const char* key) { return json.contains(key) && json[key].is_string(); };
  const auto text_or_none = [&](const char* key) { return !json.contains(key) || json[key].is_string(); };
  const bool right = json.value("format", nlohmann::json()) == kBranchFormat && json.contains("step") &&
                     json["step"].is_number_unsigned() && text("command") && text("job") && text("base") &&
                     text("set_aside_in") && json.contains("being_set_aside") && json["being_set_aside"].is_array() &&
                     text_or_none("last_command") && text_or_none("last_job") &&
                     (!json.contains("time") || json["time"].is_number());
  if (right) {
    branch = {.step = json["step"].get<std::int64_t>(),
              .time = json.value("time", 0.0),
              .command = json["command"].get<std::string>(),
              .job = json["job"].get<std::string>(),
              .last_command = json.value("last_command", ""),
              .last_job = json.value("last_job", ""),
              .base = json["base"].get<std::string>(),
              .set_aside_in = json["set_aside_in"].get<std::string>(),
              .being_set_aside = {}};
  }
  const std::string_view aside = branch.set_aside_in;
  bool names = right && (aside.empty() || (aside.starts_with(kAbandoned) &&
                                           aside.find_first_not_of("0123456789", kAbandoned.size()) == aside.npos));
  for (std::size_t i = 0; names && i < json["being_set_aside"].size(); ++i) {
    const auto& name = json["being_set_aside"][i];
    names = name.is_string() && step_of_name(name.get<std::string>()).has_value() && !branch.set_aside_in.empty();
    if (names) branch.being_set_aside.push_back(name.get<std::string>());
  }
  if (!names) {
    throw CheckpointError(
        fmt::format("{}: expected what a rollback to [checkpoint] load_step writes, format {}; found something else; "
                    "{}",
                    path.string(), kBranchFormat, kAdvice));
  }
  return branch;
}

SetAside begin_branch(const std::filesystem::path& folder, Branch branch, FileSystem& fs, const KeepBeside& keep) {
  branch.base = base_of(step_directory(folder, branch.step));
  branch.time = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::vector<std::pair<std::int64_t, std::string>> newer;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (const auto step = step_of_name(name); step && *step > branch.step) newer.emplace_back(*step, name);
  }
  std::ranges::sort(newer);
  branch.being_set_aside.clear();
  for (auto& [step, name] : newer) branch.being_set_aside.push_back(std::move(name));
  branch.set_aside_in = branch.being_set_aside.empty() ? std::string() : free_name(folder);
  if (branch.being_set_aside.empty()) {
    replace_file(folder / kBranchName, branch_text(branch), fs);
    return {};
  }
  fs.make_directory(folder / branch.set_aside_in);
  fs.sync_directory(folder);
  replace_file(folder / kBranchName, branch_text(branch), fs);
  return move_aside(folder, std::move(branch), fs, keep);
}

SetAside finish_branch(const std::filesystem::path& folder, FileSystem& fs, const KeepBeside& keep) {
  auto branch = read_branch(folder);
  if (!branch || branch->being_set_aside.empty()) return {};
  return move_aside(folder, std::move(*branch), fs, keep);
}

void renew_branch(const std::filesystem::path& folder, const std::string& command, const std::string& job,
                  FileSystem& fs) {
  auto branch = read_branch(folder);
  if (!branch) return;
  const auto latest = [](const std::string& first, const std::string& last) { return last.empty() ? first : last; };
  const bool is_same = latest(branch->command, branch->last_command) == command &&
                       (job.empty() || latest(branch->job, branch->last_job) == job);
  if (is_same) return;
  branch->last_command = command;
  if (!job.empty()) branch->last_job = job;
  replace_file(folder / kBranchName, branch_text(*branch), fs);
}

void forget_branch(const std::filesystem::path& folder, FileSystem& fs) {
  if (!branch_entry_exists(folder / kBranchName)) return;
  fs.remove(folder / kBranchName);
  fs.sync_directory(folder);
}

bool has_same_base(const std::filesystem::path& folder, const Branch& branch) {
  const auto step = step_directory(folder, branch.step);
  return !branch_entry_exists(step / kManifestName) || base_of(step) == branch.base;
}

}  // namespace phalanx
