// What a run reads, described so that a later run can tell whether it reads the same, and where it goes on.
//
//   {"version": 1, "name": "train.bin", "format": "Megatron", "type": "uint16", "tokens": 5000000,
//    "content": "9f86...", "index": "02ab...", "range": [0, 4750000], "seq_len": 2048, "shuffle": true, "seed": 0}
//
// The name is for messages: a file that was moved or copied is the same. A position is a number of tokens: epochs that
// are over count with the tokens of their whole samples.
//
//   checkpoint: json saved = describe_stream(batches); std::int64_t tokens = tokens_read(batches, step);
//   resume:     const StreamResume resume = resume_stream(saved, tokens, batches);
//               if (!resume.differences.empty()) ...                     // other data: the caller refuses or says so
//               batches.begin_at(step, resume.position);
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/data/data_loader.h"

namespace phalanx::data {

nlohmann::json describe_stream(const DataLoader& dataloader);

/// What is only looked at, as validation does, whole and in order: {"name": ..., "tokens": ..., "content": "9f86...",
/// "range": [4750000, 5000000]}.
nlohmann::json describe_range(const TokenFile& tokens, TokenRange range);

/// The stream's position before `step`.
std::int64_t tokens_read(const DataLoader& dataloader, std::int64_t step);

struct StreamResume {
  /// Where the stream goes on; with differences, its beginning.
  StreamPosition position;
  /// Why `dataloader` are not the saved stream, one a line: "[training] dataset_path: the checkpoint's run read ..., this
  /// one reads ...". Empty: every token comes once, as if the run had never stopped.
  std::vector<std::string> differences;
  /// What is the same stream but read otherwise, for the log: another sequence length.
  std::vector<std::string> notes;
};

/// `saved` and `tokens`: describe_stream() and tokens_read() of the run that goes on. Another sequence length is no
/// difference where the place is defined: without shuffling, and between two epochs. DataError where `saved` is
/// malformed or of a later version.
StreamResume resume_stream(const nlohmann::json& saved, std::int64_t tokens, const DataLoader& dataloader);

}  // namespace phalanx::data
