#include "phalanx/train/inputs/data_resume.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "phalanx/base/error.h"
#include "phalanx/data/stream_description.h"

namespace phalanx::train {
namespace {

constexpr const char* kNoPosition =
    "the checkpoint does not say how much of the data has been read (data.tokens of its manifest)";
constexpr const char* kAllowed =
    "other than before, as [checkpoint] allow_data_mismatch says; they begin at their "
    "beginning";

std::string refusal_of_data(const std::string& differences) {
  return fmt::format(
      "the data are not those that the checkpoint's run read:\n  {}\ngo on with the saved values; [checkpoint] "
      "allow_data_mismatch = true goes on all the same, from the beginning of these data",
      differences);
}

/// For a checkpoint that records only the seed, not what it read: it is taken to have read this stream.
DataResume resume_undescribed(const config::TrainConfig& config, const data::DataLoader& dataloader,
                              const std::map<std::string, std::int64_t>& integers) {
  const auto seed = integers.find(kDataSeed);
  if (dataloader.options().shuffle && seed != integers.end() && seed->second != config.debug.seed) {
    const std::string difference = fmt::format(
        "[debug] seed: the checkpoint's run had {}, this one has {}, by which the "
        "data are shuffled",
        seed->second, config.debug.seed);
    if (config.checkpoint.allow_data_mismatch) {
      return {.position = {}, .lines = {fmt::format("data: {}:\n  {}", kAllowed, difference)}};
    }
    throw CheckpointError(refusal_of_data(difference));
  }
  const auto tokens = integers.find(data::kTokensRead), sequences = integers.find(kDataSequences);
  std::int64_t read = -1;
  if (tokens != integers.end()) {
    read = tokens->second / dataloader.seq_len();
  } else if (sequences != integers.end()) {
    read = sequences->second;
  }
  if (read < 0) throw CheckpointError(kNoPosition);
  const std::int64_t samples = dataloader.sample_count();
  return {.position = {.epoch = read / samples, .token = read % samples * dataloader.seq_len()},
          .lines = {},
          .taken_as = fmt::format("it goes on after {} sequences of {} tokens of {}", read, dataloader.seq_len(),
                                  dataloader.tokens().path())};
}

}  // namespace

DataResume resume_data(const config::TrainConfig& config, const data::BatchSource& source, const nlohmann::json& saved,
                       const std::map<std::string, std::int64_t>& integers) {
  if (saved.is_null() || saved.empty()) {
    const auto* const dataloader = dynamic_cast<const data::DataLoader*>(&source);
    if (dataloader != nullptr) return resume_undescribed(config, *dataloader, integers);
    throw CheckpointError(refusal_of_data("[training]: the checkpoint does not say what its run read"));
  }
  data::StreamResume resume;
  try {
    resume = source.resume(saved, integers);
  } catch (const DataError& error) {
    throw CheckpointError(error.what());
  }
  const std::string differences = fmt::format("{}", fmt::join(resume.differences, "\n  "));
  if (!resume.differences.empty() && !config.checkpoint.allow_data_mismatch) {
    throw CheckpointError(refusal_of_data(differences));
  }
  DataResume result{.position = resume.position, .lines = {}};
  for (const std::string& note : resume.notes) result.lines.push_back("data: " + note);
  if (!resume.differences.empty()) {
    result.lines.push_back(fmt::format("data: {}:\n  {}", kAllowed, differences));
  }
  return result;
}

}  // namespace phalanx::train
