#include "phalanx/observe/flight_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_reader.h"
#include "phalanx/base/json_text.h"

namespace phalanx::observe {
namespace {

using nlohmann::json;
using Fields = JsonReader<Error>;

constexpr std::uint64_t kLargestFile = std::uint64_t{1} << 30;

FlightState state_from(const std::string& name) {
  for (const FlightState state :
       {FlightState::issued, FlightState::started, FlightState::finished, FlightState::failed}) {
    if (name == name_of(state)) return state;
  }
  throw Error(fmt::format("unknown state '{}'", name));
}

class Reader {
 public:
  explicit Reader(FlightFiles& files) : files_(files) {}

  FlightFile file(const std::filesystem::path& path) {
    try {
      nlohmann::json whole;
      if (const auto fault = json_object_fault(read_file(path, kLargestFile), whole)) throw Error(*fault);
      return parse(path, whole);
    } catch (const FileError&) {
      throw;
    } catch (const Error& error) {
      throw Error(fmt::format("{} is no flight recorder file: {}", path.string(), error.what()));
    }
  }

 private:
  std::string_view keep(std::string text) { return *files_.texts.insert(std::move(text)).first; }

  FlightEntry entry(const Fields& from) {
    FlightEntry entry;
    entry.seq = from.get<std::uint64_t>("seq");
    entry.collective = from.get_or<std::int64_t>("collective", FlightEntry::kNone);
    entry.verb = keep(from.get<std::string>("verb"));
    entry.dtype = keep(from.get_or<std::string>("dtype", ""));
    entry.count = from.get<std::int64_t>("count");
    entry.op = keep(from.get_or<std::string>("op", ""));
    entry.root = from.get_or("root", FlightEntry::kNone);
    entry.peer = from.get_or("peer", FlightEntry::kNone);
    entry.tag = from.get_or("tag", FlightEntry::kNone);
    entry.uneven = from.get_or("uneven", false);
    entry.state = state_from(from.get<std::string>("state"));
    entry.issued_us = from.get<std::int64_t>("issued_us");
    entry.started_us = from.get_or<std::int64_t>("started_us", 0);
    entry.ended_us = from.get_or<std::int64_t>("ended_us", 0);
    return entry;
  }

  FlightFileGroup group(const Fields& from, int rank, int size) {
    FlightFileGroup group;
    group.name = from.get<std::string>("group");
    group.id = from.get<std::string>("id");
    group.rank = from.get<int>("rank");
    group.members = from.get<std::vector<int>>("members");
    const auto in_job = [size](int member) { return member >= 0 && member < size; };
    const auto at = static_cast<std::size_t>(group.rank);
    if (group.rank < 0 || at >= group.members.size() || group.members[at] != rank ||
        !std::all_of(group.members.begin(), group.members.end(), in_job)) {
      throw Error(fmt::format("rank {} of {} is not rank {} of group '{}'", rank, size, group.rank, group.name));
    }
    for (const json& one : from.array("entries")) {
      group.entries.push_back(
          entry(Fields(one, fmt::format("operation {} of {}", group.entries.size(), from.where()))));
    }
    return group;
  }

  FlightFile parse(const std::filesystem::path& path, const json& whole) {
    const Fields from(whole, "it");
    FlightFile file;
    file.path = path;
    file.rank = from.get<int>("rank");
    file.size = from.get<int>("size");
    if (file.rank < 0 || file.rank >= file.size) throw Error(fmt::format("rank {} of {}", file.rank, file.size));
    file.host = from.get<std::string>("host");
    file.pid = from.get<std::int64_t>("pid");
    file.written_us = from.get<std::int64_t>("written_us");
    file.reason = from.get<std::string>("reason");
    for (const json& one : from.array("groups")) {
      file.groups.push_back(group(Fields(one, fmt::format("group {}", file.groups.size())), file.rank, file.size));
    }
    return file;
  }

  FlightFiles& files_;
};

// A common mistake: the run's folder was given instead of the folder with the files.
std::string folder_below(const std::filesystem::path& folder) {
  std::error_code error;
  for (const auto& below : std::filesystem::directory_iterator(folder, error)) {
    if (!below.is_directory(error)) continue;
    if (below.path().filename() == "comm_traces") return fmt::format("; did you mean {}?", below.path().string());
  }
  return "";
}

void require_equal_members(const FlightFile& one, const FlightFile& other) {
  for (const FlightFileGroup& a : one.groups) {
    for (const FlightFileGroup& b : other.groups) {
      if (a.id == b.id && a.members != b.members) {
        throw Error(fmt::format("{} and {} are of different runs: group '{}' has other members; remove the older one",
                                one.path.string(), other.path.string(), a.name));
      }
    }
  }
}

}  // namespace

FlightFiles read_flight_files(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder)) throw Error(fmt::format("{} does not exist", folder.string()));
  if (!std::filesystem::is_directory(folder)) {
    throw Error(fmt::format("{} is no folder: expected the one that holds the ranks' files", folder.string()));
  }
  std::vector<std::filesystem::path> paths;
  for (const auto& one : std::filesystem::directory_iterator(folder)) {
    if (one.path().extension() == ".json") paths.push_back(one.path());
  }
  std::sort(paths.begin(), paths.end());
  if (paths.empty()) {
    throw Error(fmt::format("{} holds no flight recorder file (*.json){}", folder.string(), folder_below(folder)));
  }

  FlightFiles files;
  files.folder = folder;
  Reader reader(files);
  const FlightFile* first = nullptr;
  for (const auto& path : paths) {
    FlightFile file = reader.file(path);
    if (first == nullptr) files.by_rank.resize(static_cast<std::size_t>(file.size));
    if (first != nullptr && file.size != first->size) {
      throw Error(fmt::format("{} is of a run of {} ranks and {} of one of {}: remove the older one",
                              first->path.string(), first->size, path.string(), file.size));
    }
    std::optional<FlightFile>& place = files.by_rank[static_cast<std::size_t>(file.rank)];
    if (place) {
      throw Error(fmt::format("{} and {} are both of rank {}: remove the older one", place->path.string(),
                              path.string(), file.rank));
    }
    if (first != nullptr) require_equal_members(*first, file);
    place = std::move(file);
    if (first == nullptr) first = &*place;
  }
  return files;
}

}  // namespace phalanx::observe
