#include "phalanx/checkpoint/step_writer.h"

#include <fmt/format.h>

#include <system_error>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/checkpoint/files/shard_plan.h"

namespace phalanx {
namespace {

std::filesystem::path with_suffix(std::filesystem::path path, const char* suffix) { return path += suffix; }

bool is_there(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

bool is_complete(const std::filesystem::path& directory) {
  try {
    read_step_manifest(directory);
    return true;
  } catch (const DamagedError&) {
    return false;
  }
}

}  // namespace

StepWriter::StepWriter(std::filesystem::path folder, CheckpointOptions options, FileSystem& fs)
    : folder_(std::move(folder)), options_(options), fs_(fs) {}

std::string StepWriter::describe_failure(const std::filesystem::path& step_directory, const std::string& reason) {
  return fmt::format("cannot save checkpoint {}: {} (earlier checkpoints are as they were)", step_directory.string(),
                     reason);
}

SavedCheckpoint StepWriter::write(const RankGroup& ranks, Manifest manifest, const std::vector<NamedTensor>& tensors,
                                  const std::vector<WriteItem>& boxes,
                                  const std::function<void()>& await_tensors) const {
  const auto final = step_directory(folder_, manifest.step), temporary = with_suffix(final, ".tmp");
  const bool is_first = ranks.rank() == 0;
  SavedCheckpoint saved{.path = final};
  try {
    ranks.run_collectively([&] {
      if (is_first) prepare(temporary);
      return std::string();
    });
    const auto entries = ranks.run_collectively([&] {
      if (await_tensors) await_tensors();
      return format_manifest_file(write_shard_file(fs_, temporary / shard_file_name(ranks.rank()), tensors, boxes));
    });
    for (const auto& entry : entries) {
      manifest.files.push_back(parse_manifest_file(entry));
      saved.bytes += manifest.files.back().size;
    }
    ranks.run_collectively([&] {
      if (is_first) commit(manifest, temporary, final);
      return std::string();
    });
  } catch (const CommError&) {
    throw;  // the ranks cannot communicate any more: nothing to add
  } catch (const Error& error) {
    if (is_first) {
      try {
        fs_.remove_all(temporary);
      } catch (const std::exception&) {  // the next save removes it
      }
    }
    throw CheckpointError(describe_failure(final, error.what()));
  }
  if (is_first) saved.removed = remove_old(final);
  return saved;
}

/// On rank 0: removes what unfinished saves and removals left behind, and creates the directory to write to.
void StepWriter::prepare(const std::filesystem::path& temporary) const {
  fs_.make_directory(folder_);
  std::vector<std::filesystem::path> leftovers;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder_, error)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with("step-") && name.ends_with(".tmp")) leftovers.push_back(entry.path());
  }
  if (error) throw CheckpointError(fmt::format("cannot list {}: {}", folder_.string(), error.message()));
  for (const auto& path : leftovers) fs_.remove_all(path);
  fs_.make_directory(temporary);
}

/// On rank 0: writes the manifest, syncs everything to disk, then does the rename that makes the checkpoint exist.
void StepWriter::commit(const Manifest& manifest, const std::filesystem::path& temporary,
                        const std::filesystem::path& final) const {
  auto file = fs_.create(temporary / kManifestName);
  file->write(format_manifest(manifest));
  file->sync();
  file->close();
  fs_.sync_directory(temporary);
  const auto replaced = with_suffix(final, ".replaced");
  if (is_there(final)) {
    // Between the two renames readers find the former step-N under its other name (checkpoint_list.h).
    if (is_complete(final) || !is_there(replaced)) {
      if (is_there(replaced)) retire(replaced);
      fs_.rename(final, replaced);
    } else {
      retire(final);
    }
  }
  fs_.rename(temporary, final);
  fs_.sync_directory(folder_);
  if (is_there(replaced)) retire(replaced);
}

/// Removes a checkpoint so that an interruption never leaves a part of it under its name.
void StepWriter::retire(const std::filesystem::path& directory) const {
  const auto doomed = with_suffix(directory, ".removed.tmp");
  fs_.remove_all(doomed);
  fs_.rename(directory, doomed);
  fs_.remove_all(doomed);
}

std::vector<std::filesystem::path> StepWriter::remove_old(const std::filesystem::path& newest) const {
  std::vector<std::filesystem::path> removed;
  if (options_.keep_latest_k == 0) return removed;
  int kept = 1;  // the new one, even if the folder holds later steps of an abandoned branch
  for (const auto& [path, step, damage] : list_checkpoints(folder_).complete) {
    if (path == newest) continue;
    if (options_.keep_every_steps > 0 && step % options_.keep_every_steps == 0) continue;
    if (kept++ < options_.keep_latest_k) continue;
    try {
      retire(path);
      removed.push_back(path);
    } catch (const Error& error) {  // the new checkpoint is safe: training continues
      log::warn(fmt::format("cannot remove the old checkpoint {}: {}", path.string(), error.what()));
    }
  }
  return removed;
}

}  // namespace phalanx
