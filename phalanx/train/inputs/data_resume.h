// Where the data of a run go on after a checkpoint: at the next token of the stream that it read, or not at all.
//
//   const DataResume data = resume_data(config, *batches, saved["data"], manifest.integers);
//   batches->begin_at(step, data.position);  for (const std::string& line : data.lines) say(line);
//
// Another stream (another file, order, seed or range; another sequence length inside a shuffled epoch) is a
// CheckpointError with every difference, or begins at its beginning where [checkpoint] allow_data_mismatch says so.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/config/config.h"
#include "phalanx/data/data_loader.h"

namespace phalanx::train {

/// Of the checkpoint's integers: tokens of the stream that have been read (stream_description.h), in older ones
/// sequences.
inline constexpr const char* kDataTokens = "data.tokens";
inline constexpr const char* kDataSequences = "data.position";
inline constexpr const char* kDataSeed = "seed";  // of [debug]

struct DataResume {
  data::StreamPosition position;
  std::vector<std::string> lines;  // for the log
  std::string taken_as = {};       // of a checkpoint that does not say what it read: where it goes on
};

/// `saved`: the "data" section of the checkpoint's identity; empty in a checkpoint that is older than it.
DataResume resume_data(const TrainConfig& config, const data::DataLoader& dataloader, const nlohmann::json& saved,
                       const std::map<std::string, std::int64_t>& integers);

}  // namespace phalanx::train
