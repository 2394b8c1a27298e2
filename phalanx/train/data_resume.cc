#include "phalanx/train/data_resume.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "phalanx/base/error.h"
#include "phalanx/data/stream_description.h"

namespace phalanx::train {
namespace {

/// A checkpoint that does not say what it read: it is taken to have been this.
DataResume resume_undescribed(const data::Batches& batches, const std::map<std::string, std::int64_t>& integers) {
  const auto tokens = integers.find(kDataTokens), sequences = integers.find(kDataSequences);
  std::int64_t read = -1;
  if (tokens != integers.end()) {
    read = tokens->second / batches.seq_len();
  } else if (sequences != integers.end()) {
    read = sequences->second;
  }
  if (read < 0) throw CheckpointError("the checkpoint does not say how much of the data has been read (data.tokens)");
  const std::int64_t samples = batches.sample_count();
  return {.position = {.epoch = read / samples, .token = read % samples * batches.seq_len()},
          .lines = {fmt::format("data: the checkpoint does not say what data it read: they could not be compared; it "
                                "goes on after {} sequences of {} tokens of {}",
                                read, batches.seq_len(), batches.tokens().path())}};
}

}  // namespace

DataResume resume_data(const TrainConfig& config, const data::Batches& batches, const nlohmann::json& saved,
                       const std::map<std::string, std::int64_t>& integers) {
  const auto tokens = integers.find(kDataTokens);
  if (saved.is_null() || saved.empty() || tokens == integers.end()) return resume_undescribed(batches, integers);
  data::StreamResume resume;
  try {
    resume = data::resume_stream(saved, tokens->second, batches);
  } catch (const DataError& error) {
    throw CheckpointError(error.what());
  }
  const std::string differences = fmt::format("{}", fmt::join(resume.differences, "\n  "));
  if (!resume.differences.empty() && !config.checkpoint.allow_data_mismatch) {
    throw CheckpointError(
        fmt::format("the data are not those that the checkpoint's run read:\n  {}\ngo on with the saved values; "
                    "[checkpoint] allow_data_mismatch = true goes on all the same, from the beginning of these data",
                    differences));
  }
  DataResume result{.position = resume.position, .lines = {}};
  for (const std::string& note : resume.notes) result.lines.push_back("data: " + note);
  if (!resume.differences.empty()) {
    result.lines.push_back(
        fmt::format("data: other than before, as [checkpoint] allow_data_mismatch says; they begin at their beginning:"
                    "\n  {}",
                    differences));
  }
  return result;
}

}  // namespace phalanx::train
