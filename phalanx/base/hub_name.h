// Detects Hugging Face hub names where a model's file or directory is expected. The user may have given the name of a
// model on the hub, its address, or a Git LFS pointer instead of the file. Phalanx downloads nothing, and the error
// message should say so.
//
//   fmt::format("'{}' does not exist{}", path, hub_hint(path))
//   -> 'meta-llama/Llama-3.1-8B' does not exist: it looks like a name on the Hugging Face hub, from which nothing is
//      downloaded: ...
#pragma once

#include <string>
#include <string_view>

namespace phalanx {

/// True if it has the form owner/name and no such path exists.
bool is_hub_name(std::string_view path);

/// A hint to append to an error message after the path, for a hub name or an address; "" if it is neither.
std::string hub_hint(std::string_view path);

/// True if a file with this beginning is a Git LFS pointer, as `git clone` leaves it if Git LFS is not installed.
bool is_lfs_pointer(std::string_view head);

inline constexpr std::string_view kLfsHint =
    "it is a Git LFS pointer that stands for the file itself: fetch that by `git lfs pull` in its folder";

}  // namespace phalanx
