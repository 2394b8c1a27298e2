#include "phalanx/infer/jobs/batch_job.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/json_depth.h"
#include "phalanx/base/json_lines.h"
#include "phalanx/base/json_text.h"

namespace phalanx::infer {
namespace {

constexpr std::string_view kPart = "part-", kLines = ".jsonl";
constexpr int kFormat = 2;
constexpr int kFormatOfPaths = 1;  // format without "format", where "model" and "tokenizer" are paths

struct JobDifferences {
  std::vector<std::string> lines;
  std::vector<std::string> missing;  // parts that the folder's description lacks
};

/// Compares values by their keys, recursively. If the folder's description is not `complete`, missing keys are no
/// difference.
void compare(const std::string& prefix, const nlohmann::json& found, const nlohmann::json& wanted, bool complete,
             JobDifferences& differences) {
  nlohmann::json all = wanted;
  if (complete) all.update(found);
  for (const auto& item : all.items()) {
    const std::string key = prefix + item.key();
    if (key == "format") continue;
    const bool is_there = found.contains(item.key());
    const auto was = is_there ? found[item.key()] : nlohmann::json();
    const auto is = wanted.contains(item.key()) ? wanted[item.key()] : nlohmann::json();
    if (was == is) continue;
    if (!is_there && !complete) {
      differences.missing.push_back(key);
    } else if (was.is_object() && is.is_object()) {
      compare(key + ".", was, is, /*complete=*/true, differences);
    } else {
      differences.lines.push_back(fmt::format("its {} is {}, this one's {}", key, was.dump(), is.dump()));
    }
  }
}

/// Bytes up to the end of the last line that has one.
std::size_t whole_lines(std::string_view text) { return text.rfind('\n') + 1; }  // npos + 1 is 0

/// The results of a part: index and record. Text after the last line's end is a result that was being written.
void each_result(const std::filesystem::path& part, std::size_t prompts,
                 const std::function<void(std::size_t, nlohmann::ordered_json)>& use) {
  const std::string text = read_file(part);
  each_line(std::string_view(text).substr(0, whole_lines(text)), part.string(),
            [&](std::string_view line, const std::string& where) {
              // A record contains what its prompt's line contained, one level deeper.
              const bool deep = is_json_too_deep(line, kMaxJsonDepth + 1);
              auto json = nlohmann::ordered_json::parse(deep ? "" : line, nullptr, /*allow_exceptions=*/false);
              const bool right = json.is_object() && json.contains("index") && json["index"].is_number_unsigned() &&
                                 json.contains("record") && json["record"].is_object();
              if (!right || json["index"].get<std::size_t>() >= prompts) {
                throw DataError(
                    fmt::format("{}: expected {{\"index\": 0 to {}, \"record\": {{...}}}}, a result of this "
                                "job; remove the line to have it computed again",
                                where, prompts - 1));
              }
              use(json["index"].get<std::size_t>(), std::move(json["record"]));
            });
}

}  // namespace

BatchJob::BatchJob(std::filesystem::path folder, FileSystem& files) : folder_(std::move(folder)), files_(files) {}

std::vector<std::filesystem::path> BatchJob::parts() const {
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kPart) && name.ends_with(kLines)) found.push_back(entry.path());
  }
  std::ranges::sort(found);
  return found;
}

std::vector<std::string> BatchJob::open(const nlohmann::json& description) {
  const std::filesystem::path path = folder_ / "job.json";
  // As a file can hold it: a stop text from the command line may not be valid UTF-8.
  auto written = nlohmann::json::parse(description.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  written["format"] = kFormat;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    files_.make_directory(folder_);
    if (!parts().empty()) {
      throw DataError(fmt::format(
          "{} has results but no job.json that says of what: choose another folder, or remove it", folder_.string()));
    }
    replace_file(path, written.dump(1) + "\n", files_);
    return {};
  }
  auto found = parse_json_object<DataError>(read_file(path), path.string());
  const auto format = found.value("format", nlohmann::json(kFormatOfPaths));
  if (!format.is_number_integer() || format.get<std::int64_t>() > kFormat) {
    throw DataError(fmt::format("{}: its format is {}: this program reads formats up to {}", path.string(),
                                format.dump(), kFormat));
  }
  const bool of_paths = format.get<std::int64_t>() <= kFormatOfPaths;
  if (of_paths) {
    for (const char* key : {"model", "tokenizer"}) found.erase(key);
  }
  JobDifferences differences;
  compare("", found, written, !of_paths, differences);
  if (!differences.lines.empty()) {
    throw DataError(
        fmt::format("{} is the folder of another job: {}; give what it was begun with, choose another "
                    "folder, or remove it to begin anew",
                    folder_.string(), fmt::join(differences.lines, "; ")));
  }
  const auto temperature = found.value("temperature", nlohmann::json());
  if (of_paths && temperature.is_number() && temperature.get<double>() > 0) {
    throw DataError(
        fmt::format("{} was begun by an earlier version of Phalanx, which drew the answers of each prompt by another "
                    "seed (its temperature is {}): the rest would not be of the same job. Choose another folder, or "
                    "remove it to begin anew",
                    folder_.string(), temperature.dump()));
  }
  if (of_paths) replace_file(path, written.dump(1) + "\n", files_);
  return differences.missing;
}

std::vector<bool> BatchJob::finished(std::size_t prompts) const {
  std::vector<bool> done(prompts, false);
  for (const auto& part : parts()) {
    each_result(part, prompts, [&](std::size_t index, const nlohmann::ordered_json&) { done[index] = true; });
  }
  return done;
}

void BatchJob::begin(int rank) {
  const std::filesystem::path path = folder_ / fmt::format("{}{:05}{}", kPart, rank, kLines);
  std::error_code error;
  if (std::filesystem::exists(path, error)) {
    std::filesystem::resize_file(path, whole_lines(read_file(path)));
  }
  part_ = files_.append(path);
}

void BatchJob::add(std::size_t index, const nlohmann::ordered_json& record) {
  const nlohmann::ordered_json line = {{"index", index}, {"record", record}};
  part_->write(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void BatchJob::merge(std::size_t prompts, const std::string& name, const std::set<std::size_t>& skipped) const {
  std::vector<std::string> records(prompts);
  for (const auto& part : parts()) {
    each_result(part, prompts, [&](std::size_t index, const nlohmann::ordered_json& record) {
      if (records[index].empty()) records[index] = record.dump() + "\n";
    });
  }
  std::string all;
  for (std::size_t i = 0; i < prompts; ++i) {
    if (records[i].empty() && !skipped.contains(i)) {
      throw DataError(
          fmt::format("{} has no result of prompt {}: do all ranks write to this folder?", folder_.string(), i + 1));
    }
    all += records[i];
  }
  replace_file(folder_ / name, all, files_);
}

}  // namespace phalanx::infer
