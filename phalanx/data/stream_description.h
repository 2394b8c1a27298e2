// Describes what a run reads, so that a later run can tell whether it reads the same, and where it continues.
//
//   {"version": 1, "name": "train.bin", "format": "Megatron", "type": "uint16", "tokens": 5000000,
//    "content": "9f86...", "index": "02ab...", "range": [0, 4750000], "seq_len": 2048, "shuffle": true, "seed": 0}
//
// A file with a mask (token_file.h) has "mask": its hash.
// A packed stream (packed_rows.h) has "version": 2 and "packing": {"kind": "best_fit", "rows": 1234}. A blend
// (blended_loader.h) has "version": 3, "seq_len" and "sets": [{"name": "web", "share": 7, "stream": {...}}, ...]. Its
// position is the number of tokens of all its rows. Texts (corpus/text_stream.h) have "version": 4 and describe
// themselves.
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
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/data/data_loader.h"

namespace phalanx::data {

inline constexpr std::int64_t kBlendVersion = 3, kTextStreamVersion = 4;

nlohmann::json describe_stream(const DataLoader& dataloader);

/// Describes a range that is read whole and in order, as validation does: {"name": ..., "tokens": ...,
/// "content": "9f86...", "range": [4750000, 5000000]}.
nlohmann::json describe_range(const TokenFile& tokens, TokenRange range);

/// The stream's position before `step`.
std::int64_t tokens_read(const DataLoader& dataloader, std::int64_t step);

/// `saved` and `tokens`: describe_stream() and tokens_read() of the run that is resumed. Another sequence length is no
/// difference where the position is defined: without shuffling, and between two epochs. Throws DataError if `saved` is
/// malformed or of a later version.
StreamResume resume_stream(const nlohmann::json& saved, std::int64_t tokens, const DataLoader& dataloader);

/// Why `now` is not the stream `saved`, both made by describe_stream(); without their sequence lengths. Throws as
/// resume_stream() does.
std::vector<std::string> stream_differences(const nlohmann::json& saved, const nlohmann::json& now);

/// "version" of a description. Throws DataError if it has none or that of a later version of Phalanx.
std::int64_t stream_version(const nlohmann::json& saved);
/// For messages: "train.bin", or "a blend of web, code".
std::string stream_text(const nlohmann::json& saved);
/// The number of tokens in a checkpoint's integers. Throws DataError if there is none.
std::int64_t tokens_in(const std::map<std::string, std::int64_t>& saved_position);

}  // namespace phalanx::data
