// A folder that Hugging Face's datasets package wrote by save_to_disk(): Arrow files, and state.json, which lists
// them.
//
//   if (const auto files = dataset_files("stories"))
//     for (const auto& file : *files) each_arrow_text(file, "text", use);
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

namespace phalanx::data {

/// Its Arrow files, in the order of its rows; nothing for a folder that is none of that package. Throws DataError that
/// says what to name instead for one with several splits and for a cache of that package; also for one of which rows
/// were selected that the files do not hold by themselves, and for one that lacks a file.
std::optional<std::vector<std::filesystem::path>> dataset_files(const std::filesystem::path& folder);

}  // namespace phalanx::data
