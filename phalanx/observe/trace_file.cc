#include "phalanx/observe/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"

namespace phalanx::observe {
namespace {

using nlohmann::json;

TraceFile parse_trace(const std::filesystem::path& path) {
  constexpr std::uint64_t kLargestTrace = std::uint64_t{1} << 30;
  try {
    const json whole = json::parse(read_file(path, kLargestTrace));
    TraceFile file;
    std::optional<int> rank;
    std::optional<double> first;
    for (const json& event : whole.at("traceEvents")) {
      rank = event.at("pid").get<int>();
      if (event.at("ph").get<std::string>() != "X") continue;
      const double begin = event.at("ts").get<double>();
      first = first ? std::min(*first, begin) : begin;
    }
    if (!rank) throw Error("it has no events");
    file.rank = *rank;
    file.epoch_seconds = first.value_or(0.0) * 1e-6;
    for (const json& event : whole.at("traceEvents")) {
      if (event.at("ph").get<std::string>() != "X") continue;
      const double begin = event.at("ts").get<double>() - *first;
      file.spans.push_back({event.at("name").get<std::string>(), event.value("cat", std::string()), begin * 1e-6,
                            (begin + event.at("dur").get<double>()) * 1e-6});
    }
    return file;
  } catch (const FileError&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(fmt::format("{} is no trace: {}", path.string(), error.what()));
  }
}

bool is_trace(const std::filesystem::path& path) { return path.filename().string().ends_with("_trace.json"); }

// The usual slip: a folder above.
std::string trace_folder_below(const std::filesystem::path& folder) {
  std::error_code error;
  std::optional<std::filesystem::path> found;
  for (std::filesystem::recursive_directory_iterator below(folder, error), end; !error && below != end;
       below.increment(error)) {
    if (below.depth() > 1) below.disable_recursion_pending();
    const std::filesystem::path& path = below->path();
    if (is_trace(path) && (!found || *found < path.parent_path())) found = path.parent_path();
  }
  return found ? fmt::format("; did you mean {}?", found->string()) : "";
}

}  // namespace

std::vector<TraceFile> read_trace_files(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder)) throw Error(fmt::format("{} does not exist", folder.string()));
  if (!std::filesystem::is_directory(folder)) {
    throw Error(fmt::format("{} is no folder: expected the one that holds the ranks' traces", folder.string()));
  }
  std::vector<std::filesystem::path> paths;
  for (const auto& one : std::filesystem::directory_iterator(folder)) {
    if (is_trace(one.path())) paths.push_back(one.path());
  }
  if (paths.empty()) {
    throw Error(fmt::format("{} holds no trace (*_trace.json){}", folder.string(), trace_folder_below(folder)));
  }
  std::ranges::sort(paths);
  std::vector<TraceFile> files;
  for (const auto& path : paths) {
    files.push_back(parse_trace(path));
    const int rank = files.back().rank;
    if (std::ranges::count(files, rank, &TraceFile::rank) > 1) {
      throw Error(fmt::format("{} is the second trace of rank {} in its folder", path.string(), rank));
    }
  }
  std::ranges::sort(files, {}, &TraceFile::rank);
  return files;
}

}  // namespace phalanx::observe
