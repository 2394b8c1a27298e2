// The nearest valid name to a mistyped one, for error messages.
//
//   throw ConfigError(fmt::format("unknown key '{}'{}", key, did_you_mean(key, known)));
//   -> unknown key 'learning_rat' (did you mean 'learning_rate'?)
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

/// The number of insertions, deletions, substitutions and swaps of neighbours that turn one into the other. ASCII case
/// is ignored.
std::size_t edit_distance(std::string_view a, std::string_view b);

/// The candidate with the smallest edit distance (the first of equals), or "" if none is near enough. Near means a
/// distance of at most two, or of a third of the longer name; for names of three letters, a distance of one. A
/// candidate that contains `name` is near too.
std::string nearest(std::string_view name, const std::vector<std::string>& candidates);

/// " (did you mean 'x'?)", or "" if no candidate is near.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace phalanx
