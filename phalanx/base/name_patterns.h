// Shell-style patterns over names, such as those of parameters: * matches any characters, including dots and none, ?
// matches one, [abc] one of these. A pattern must match the whole name: "*norm*" matches every name with "norm" in it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

bool matches_pattern(const std::string& pattern, const std::string& name);

/// For each name, whether any of the patterns matches it. A pattern that matches no name throws a ConfigError that
/// begins with `what` and shows the nearest name.
std::vector<bool> matching_names(const std::string& what, const std::vector<std::string>& patterns,
                                 const std::vector<std::string>& names);

/// How many characters would have to change for the pattern to match. Its stars and question marks cost nothing.
std::size_t pattern_distance(std::string_view pattern, std::string_view name);

/// "layers.12.wq.weight" -> "layers.*.wq.weight".
std::string without_numbers(std::string_view name);

}  // namespace phalanx
