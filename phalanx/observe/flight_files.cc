#include "phalanx/observe/flight_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"

namespace phalanx::observe {
namespace {

using nlohmann::json;

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
      return parse(path, json::parse(read_file(path, kLargestFile)));
    } catch (const json::exception& error) {
      throw Error(fmt::format("{} is no flight recorder file: {}", path.string(), error.what()));
    } catch (const FileError&) {
      throw;
    } catch (const Error& error) {
      throw Error(fmt::format("{} is no flight recorder file: {}", path.string(), error.what()));
    }
  }

 private:
  std::string_view text(const json& parent, const char* key) {
    const auto found = parent.find(key);
    return found == parent.end() ? std::string_view() : *files_.texts.insert(found->get<std::string>()).first;
  }

  FlightEntry entry(const json& from) {
    FlightEntry entry;
    entry.seq = from.at("seq").get<std::uint64_t>();
    entry.collective = from.value("collective", std::int64_t{FlightEntry::kNone});
    entry.verb = *files_.texts.insert(from.at("verb").get<std::string>()).first;
    entry.dtype = text(from, "dtype");
    entry.count = from.at("count").get<std::int64_t>();
    entry.op = text(from, "op");
    entry.root = from.value("root", FlightEntry::kNone);
    entry.peer = from.value("peer", FlightEntry::kNone);
    entry.tag = from.value("tag", FlightEntry::kNone);
    entry.uneven = from.value("uneven", false);
    entry.state = state_from(from.at("state").get<std::string>());
    entry.issued_us = from.at("issued_us").get<std::int64_t>();
    entry.started_us = from.value("started_us", std::int64_t{0});
    entry.ended_us = from.value("ended_us", std::int64_t{0});
    return entry;
  }

  FlightFileGroup group(const json& from, int rank, int size) {
    FlightFileGroup group;
    group.name = from.at("group").get<std::string>();
    group.id = from.at("id").get<std::string>();
    group.rank = from.at("rank").get<int>();
    group.members = from.at("members").get<std::vector<int>>();
    const auto in_job = [size](int member) { return member >= 0 && member < size; };
    const auto at = static_cast<std::size_t>(group.rank);
    if (group.rank < 0 || at >= group.members.size() || group.members[at] != rank ||
        !std::all_of(group.members.begin(), group.members.end(), in_job)) {
      throw Error(fmt::format("rank {} of {} is not rank {} of group '{}'", rank, size, group.rank, group.name));
    }
    for (const json& one : from.at("entries")) group.entries.push_back(entry(one));
    return group;
  }

  FlightFile parse(const std::filesystem::path& path, const json& from) {
    FlightFile file;
    file.path = path;
    file.rank = from.at("rank").get<int>();
    file.size = from.at("size").get<int>();
    if (file.rank < 0 || file.rank >= file.size) throw Error(fmt::format("rank {} of {}", file.rank, file.size));
    file.host = from.at("host").get<std::string>();
    file.pid = from.at("pid").get<std::int64_t>();
    file.written_us = from.at("written_us").get<std::int64_t>();
    file.reason = from.at("reason").get<std::string>();
    for (const json& one : from.at("groups")) file.groups.push_back(group(one, file.rank, file.size));
    return file;
  }

  FlightFiles& files_;
};

// The usual slip: the run's folder in place of the one that the files are in.
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
