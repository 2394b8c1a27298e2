// What stands where a file or directory of a model is expected, and is something else of the Hugging Face hub's: the
// name of a model there, its address, or a pointer of Git LFS in place of the file. Nothing is downloaded, which a
// message should say.
//
//   fmt::format("'{}' does not exist{}", path, hub_hint(path))
//   -> 'meta-llama/Llama-3.1-8B' does not exist: it looks like a name on the Hugging Face hub, from which nothing is
//      downloaded: ...
#pragma once

#include <string>
#include <string_view>

namespace phalanx {

/// Whether it has the form owner/name and no such path exists.
bool is_hub_name(std::string_view path);

/// What a message says, after the path, of a name on the hub or an address; "" where it is none.
std::string hub_hint(std::string_view path);

/// Whether a file with this beginning stands for another, as `git clone` leaves it without Git LFS.
bool is_lfs_pointer(std::string_view head);

inline constexpr std::string_view kLfsHint =
    "it is a Git LFS pointer that stands for the file itself: fetch that by `git lfs pull` in its folder";

}  // namespace phalanx
