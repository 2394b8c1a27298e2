// The names of this program's functions, for reports that say where a call came from.
#pragma once

#include <string>

namespace phalanx::sim_device {

/// The innermost function on the calling thread's stack that belongs to this program, without its arguments, and
/// neither to the simulated device nor to libtorch's or the standard library's templates. If there is no other, such a
/// template of a type of ours. "" if there is none, or the program has no symbols.
std::string calling_function();

}  // namespace phalanx::sim_device
