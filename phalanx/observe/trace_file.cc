#include "phalanx/observe/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_reader.h"
#include "phalanx/base/json_text.h"

namespace phalanx::observe {
namespace {

using nlohmann::json;

TraceFile parse_trace(const std::filesystem::path& path) {
  constexpr std::uint64_t kLargestTrace = std::uint64_t{1} << 30;
  try {
    json whole;
    if (const auto fault = json_object_fault(read_file(path, kLargestTrace), whole)) throw Error(*fault);
    const json& events = JsonReader<Error>(whole, "it").array("traceEvents");
    TraceFile file;
    std::optional<int> rank;
    std::optional<double> first;
    const auto each_event = [&](const std::function<void(const JsonReader<Error>&)>& use) {
      for (std::size_t i = 0; i < events.size(); ++i) use({events[i], fmt::format("event {}", i)});
    };
    each_event([&](const JsonReader<Error>& event) {
      rank = event.get<int>("pid");
      if (event.get<std::string>("ph") != "X") return;
      const auto begin = event.get<double>("ts");
      first = first ? std::min(*first, begin) : begin;
    });
    if (!rank) throw Error("it has no events");
    file.rank = *rank;
    file.epoch_seconds = first.value_or(0.0) * 1e-6;
    each_event([&](const JsonReader<Error>& event) {
      if (event.get<std::string>("ph") != "X") return;
      const double begin = event.get<double>("ts") - *first;
      file.spans.push_back({event.get<std::string>("name"), event.get_or<std::string>("cat", ""), begin * 1e-6,
                            (begin + event.get<double>("dur")) * 1e-6});
    });
    return file;
  } catch (const FileError&) {
    throw;
  } catch (const Error& error) {
    throw Error(fmt::format("{} is no trace: {}", path.string(), error.what()));
  }
}

bool is_trace(const std::filesystem::path& path) { return path.filename().string().ends_with("_trace.json"); }

// A common mistake: a folder above was given.
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
