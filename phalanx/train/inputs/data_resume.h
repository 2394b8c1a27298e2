// Decides where a run's data continue after a checkpoint: at the next token of the stream that it read, or nowhere.
//
//   const DataResume data = resume_data(config, *source, saved["data"], manifest.integers);
//   source->begin_at(step, data.position);
//   for (const std::string& line : data.lines) log_info(line);
//
// Another stream is another file, order, seed or range, or another sequence length inside a shuffled epoch. It is a
// CheckpointError that lists every difference. With [checkpoint] allow_data_mismatch it is read from its beginning.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/config/config.h"
#include "phalanx/data/data_loader.h"

namespace phalanx::train {

/// Keys of the checkpoint's integers, beside data::kTokensRead: older checkpoints count sequences.
inline constexpr const char* kDataSequences = "data.position";
inline constexpr const char* kDataSeed = "seed";  // of [debug]

struct DataResume {
  data::StreamPosition position;
  std::vector<std::string> lines;  // for the log
  std::string taken_as = {};       // where the data continue if the checkpoint does not say what it read
};

/// `saved`: the "data" section of the checkpoint's identity; empty for a checkpoint that predates it.
DataResume resume_data(const config::TrainConfig& config, const data::BatchSource& source, const nlohmann::json& saved,
                       const std::map<std::string, std::int64_t>& integers);

}  // namespace phalanx::train
