// Sets of CPUs as the kernel and the user write them: "0-3,8".
//
//   cpus_in_list("8,0-3")          // {0, 1, 2, 3, 8}
//   cpu_list_text({0, 1, 2, 3, 8})  // "0-3,8"
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

/// The CPUs in ascending order, each once; an empty text gives none. White space at the end (as in files of /sys) is
/// skipped. Returns nullopt if the text is not such a list.
std::optional<std::vector<int>> cpus_in_list(std::string_view text);

/// REQUIRES: `cpus` is in ascending order and has no duplicates.
std::string cpu_list_text(const std::vector<int>& cpus);

}  // namespace phalanx
