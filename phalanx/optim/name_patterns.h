// Patterns over the names of parameters, as a shell's over files: * is any characters, dots and none among them, ? is
// one, [abc] one of these. A pattern stands for the whole name: "*norm*" for every name with "norm" in it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

/// For each name whether any of the patterns matches it. A pattern that matches none is a ConfigError that begins with
/// `what` and shows the name that comes nearest.
std::vector<bool> matching_names(const std::string& what, const std::vector<std::string>& patterns,
                                 const std::vector<std::string>& names);

/// How many characters would have to change for the pattern to match: its stars and question marks cost nothing.
std::size_t pattern_distance(std::string_view pattern, std::string_view name);

}  // namespace phalanx
