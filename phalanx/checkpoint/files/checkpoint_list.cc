#include "phalanx/checkpoint/files/checkpoint_list.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "phalanx/base/hub_name.h"
#include "phalanx/base/log.h"
#include "phalanx/checkpoint/files/branch.h"
#include "phalanx/checkpoint/files/saved_state.h"

namespace phalanx {
namespace {

constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kReplacedSuffix = ".replaced";
constexpr std::string_view kTemporarySuffix = ".tmp";

}  // namespace

std::optional<std::int64_t> step_of_name(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  name.remove_prefix(kStepPrefix.size());
  if (name.ends_with(kReplacedSuffix)) name.remove_suffix(kReplacedSuffix.size());
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || step < 0) return std::nullopt;
  return step;
}

std::filesystem::path step_directory(const std::filesystem::path& folder, std::int64_t step) {
  return folder / fmt::format("{}{}", kStepPrefix, step);
}

CheckpointList list_checkpoints(const std::filesystem::path& folder) {
  CheckpointList list;
  std::error_code error;
  if (!std::filesystem::exists(folder, error)) return list;
  std::vector<FoundCheckpoint> candidates;
  std::filesystem::directory_iterator entries(folder, error);
  if (error)
    throw CheckpointError(fmt::format("cannot list the checkpoints in {}: {}", folder.string(), error.message()));
  const auto branch = read_branch(folder);
  for (const auto& entry : entries) {
    const auto name = entry.path().filename().string();
    if (branch && std::ranges::find(branch->being_set_aside, name) != branch->being_set_aside.end()) {
      list.skipped.push_back(fmt::format("{}: set aside by the rollback to step {}", name, branch->step));
    } else if (const auto step = step_of_name(name)) {
      candidates.push_back({entry.path(), *step});
    } else if (name.starts_with(kStepPrefix) && name.ends_with(kTemporarySuffix)) {
      list.skipped.push_back(fmt::format("{}: its saving or removal was not finished", name));
    }
  }
  // Newest first; of the two directories of one step, "step-N" before "step-N.replaced".
  std::ranges::sort(
      candidates, [](const auto& a, const auto& b) { return std::pair(-a.step, a.path) < std::pair(-b.step, b.path); });
  std::ranges::sort(list.skipped);
  for (auto& candidate : candidates) {
    const auto name = candidate.path.filename().string();
    try {
      const auto step = read_step_manifest(candidate.path).step;
      if (step != candidate.step) throw DamagedError(fmt::format("its manifest is of step {}", step));
      list.complete.push_back(std::move(candidate));
    } catch (const DamagedError& reason) {
      list.skipped.push_back(fmt::format("{}: {}", name, reason.what()));
      candidate.damage = reason.what();
      list.damaged.push_back(std::move(candidate));
    }
  }
  return list;
}

std::filesystem::path checkpoint_folder(const std::filesystem::path& path) {
  if (!list_checkpoints(path).complete.empty()) return path;
  std::error_code error;
  std::vector<std::filesystem::path> below = {path / "checkpoint"};
  if (std::filesystem::exists(path / "run.json", error)) {  // there [checkpoint] folder may be another
    below.clear();
    for (const auto& entry : std::filesystem::directory_iterator(path, error)) below.push_back(entry.path());
    std::ranges::sort(below);
  }
  std::erase_if(below, [&](const auto& folder) {
    return !std::filesystem::is_directory(folder, error) || list_checkpoints(folder).complete.empty();
  });
  if (below.empty()) return path;
  if (below.size() == 1) return below.front();
  throw CheckpointError(fmt::format("{} has several folders with checkpoints: expected one of them, {} or {}",
                                    path.string(), below[0].string(), below[1].string()));
}

std::filesystem::path resolve_checkpoint(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    std::string hint = hub_hint(path.string());
    if (hint.empty()) hint = ": expected a run's folder, its checkpoint folder, or one of the step-N in that";
    if (path.extension() == ".safetensors" && std::filesystem::exists(path, error)) {
      hint += "; or, of weights alone, the directory that has config.json beside them";
    }
    throw CheckpointError(fmt::format("{} is not a directory{}", path.string(), hint));
  }
  if (std::filesystem::exists(path / kManifestName, error)) return path;
  auto folder = checkpoint_folder(path);
  auto list = list_checkpoints(folder);
  if (!list.complete.empty()) {
    const FoundCheckpoint& newest = list.complete.front();
    for (const FoundCheckpoint& damaged : list.damaged) {
      if (damaged.step <= newest.step) continue;
      log::warn_once(fmt::format("{} is passed over, and {} taken: {}", damaged.path.string(),
                                 newest.path.filename().string(), damaged.damage));
    }
    return newest.path;
  }
  // For a run's folder: what is wrong below it.
  if (const auto below = path / "checkpoint"; list.skipped.empty() && std::filesystem::is_directory(below, error)) {
    folder = below;
    list = list_checkpoints(folder);
  }
  std::string reasons;
  for (const auto& line : list.skipped) reasons += "\n  " + line;
  std::string other;
  if (std::filesystem::exists(path / "config.json", error)) {
    other = ": it is a Hugging Face directory, which `phalanx generate`, `eval` and `train` read and this does not";
  } else if (std::filesystem::exists(path / "adapter_config.json", error)) {
    other =
        ": it holds an adapter (PEFT): give its base as --checkpoint and this as --adapter, or add it to its base by "
        "`phalanx checkpoint merge`";
  }
  throw CheckpointError(fmt::format("{} holds no complete checkpoint{}{}{}", folder.string(), other,
                                    reasons.empty() ? "" : ":", reasons));
}

}  // namespace phalanx
