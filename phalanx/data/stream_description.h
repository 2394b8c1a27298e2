// Describes what a run reads, so that a later run can tell whether it reads the same, and where it continues.
//
//   {"version": 1, "name": "train.bin", "format": "Megatron", "type": "uint16", "tokens": 5000000,
//    "content": "9f86...", "index": "02ab...", "range": [0, 4750000], "seq_len": 2048, "shuffle": true, "seed": 0}
//
// A file with a mask (token_file.h) has "mask": its hash.
// A packed stream (packed_rows.h) has "version": 2 and "packing": {"kind": "best_fit", "rows": 1234}.
//
// The name is only for messages: a file that was moved or copied is the same. A position is a number of tokens.
// Finished epochs count with the tokens of their whole samples.
//
//   // When a checkpoint is saved:
//   const nlohmann::json saved = describe_stream(dataloader);
//   const std::int64_t tokens = tokens_read(dataloader, step);
//   // When the run resumes:
//   const StreamResume resume = resume_stream(saved, tokens, dataloader);
//   if (!resume.differences.empty()) refuse();                       // other data: the caller refuses or logs it
//   dataloader.begin_at(step, resume.position);
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/data/data_loader.h"

namespace phalanx::data {

nlohmann::json describe_stream(const DataLoader& dataloader);

/// Describes a range that is read whole and in order, as validation does: {"name": ..., "tokens": ...,
/// "content": "9f86...", "range": [4750000, 5000000]}.
nlohmann::json describe_range(const TokenFile& tokens, TokenRange range);

/// The stream's position before `step`.
std::int64_t tokens_read(const DataLoader& dataloader, std::int64_t step);

struct StreamResume {
  /// Where the stream continues; if there are differences, its beginning.
  StreamPosition position;
  /// Why `dataloader` is not the saved stream, one reason a line: "[training] dataset_path: the checkpoint's run read
  /// ..., this one reads ...". Empty: every token is read once, as if the run had never stopped.
  std::vector<std::string> differences;
  /// For the log: how the same stream is read differently, such as with another sequence length.
  std::vector<std::string> notes;
};

/// `saved` and `tokens`: describe_stream() and tokens_read() of the run that is resumed. Another sequence length is no
/// difference where the position is defined: without shuffling, and between two epochs. Throws DataError if `saved` is
/// malformed or of a later version.
StreamResume resume_stream(const nlohmann::json& saved, std::int64_t tokens, const DataLoader& dataloader);

}  // namespace phalanx::data
