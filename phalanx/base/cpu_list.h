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

/// Ascending, each once; of an empty text none. White space at the end (of a file of /sys) is skipped. Nothing where
/// the text is no such list.
std::optional<std::vector<int>> cpus_in_list(std::string_view text);

/// `cpus` ascending, each once.
std::string cpu_list_text(const std::vector<int>& cpus);

}  // namespace phalanx
