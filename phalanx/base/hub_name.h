// A name on the Hugging Face hub where a directory is expected: nothing is downloaded, which a message should say.
//
//   fmt::format("'{}' does not exist{}", path, hub_hint(path))
//   -> 'meta-llama/Llama-3.1-8B' does not exist: it looks like a name on the Hugging Face hub, from which nothing is
//      downloaded; expected the directory of a model that has been
#pragma once

#include <string>
#include <string_view>

namespace phalanx {

/// Whether it has the form owner/name and no such path exists.
bool is_hub_name(std::string_view path);

/// What a message says of it, or "" where it is none.
std::string hub_hint(std::string_view path);

}  // namespace phalanx
