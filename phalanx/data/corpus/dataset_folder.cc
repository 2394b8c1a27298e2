#include "phalanx/data/corpus/dataset_folder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <string>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_depth.h"

namespace phalanx::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

bool has(const fs::path& folder, const char* name) {
  std::error_code error;
  return fs::exists(folder / name, error);
}

bool has_arrow_file(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".arrow") return true;
  }
  return false;
}

/// An object; empty if the file is none.
json object_in(const fs::path& path) {
  const std::string text = read_file(path);
  json found = is_json_too_deep(text) ? json() : json::parse(text, nullptr, /*allow_exceptions=*/false);
  return found.is_object() ? found : json::object();
}

/// The names in a list of strings, or of objects with "filename".
std::vector<std::string> names_in(const json& object, const char* key) {
  std::vector<std::string> names;
  const auto list = object.find(key);
  if (list == object.end() || !list->is_array()) return names;
  for (const json& one : *list) {
    const json name = one.is_object() ? one.value("filename", json()) : one;
    if (name.is_string()) names.push_back(name.get<std::string>());
  }
  return names;
}

[[noreturn]] void refuse_splits(const fs::path& folder) {
  const std::vector<std::string> splits = names_in(object_in(folder / "dataset_dict.json"), "splits");
  throw DataError(fmt::format("{} holds the splits of a data set{}{}: name one of its folders, such as {}",
                              folder.string(), splits.empty() ? "" : ", ", fmt::join(splits, ", "),
                              (folder / (splits.empty() ? "train" : splits.front())).string()));
}

}  // namespace

std::optional<std::vector<fs::path>> dataset_files(const fs::path& folder) {
  if (has(folder, "dataset_dict.json")) refuse_splits(folder);
  const fs::path state_path = folder / "state.json";
  const json state = has(folder, "state.json") ? object_in(state_path) : json::object();
  const std::vector<std::string> names = names_in(state, "_data_files");
  if (names.empty()) {
    if (!has_arrow_file(folder)) return std::nullopt;
    if (has(folder, "state.json")) {
      throw DataError(fmt::format(
          "{}: expected \"_data_files\", which lists the Arrow files of this folder, as save_to_disk() of the datasets "
          "package writes it; found none: save it again, or name the files",
          state_path.string()));
    }
    if (!has(folder, "dataset_info.json")) return std::nullopt;
    throw DataError(
        fmt::format("{0} is a cache of the datasets package, whose files may be of several splits: name those of one, "
                    "such as '{0}/*-train*.arrow'",
                    folder.string()));
  }
  for (const char* key : {"_indices_files", "_indices_data_files"}) {
    if (names_in(state, key).empty()) continue;
    throw DataError(
        fmt::format("{}: \"{}\" selects rows, which the Arrow files do not do by themselves: save it again after "
                    "dataset.flatten_indices()",
                    state_path.string(), key));
  }
  std::vector<fs::path> files;
  for (const std::string& name : names) {
    files.push_back(folder / fs::path(name).filename());
    std::error_code error;
    if (fs::exists(files.back(), error)) continue;
    throw DataError(fmt::format("{}: lists {}, which is not in its folder: copy the whole folder, or save it again",
                                state_path.string(), name));
  }
  return files;
}

}  // namespace phalanx::data
