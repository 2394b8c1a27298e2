// Takes a part of a C++ source by its name: the lines between those that end with "// [lecture: NAME]" and with
// "// [/lecture]", else the function of that name, with the comment right above it.
//
//   excerpt(source, "by_columns", "recipes/tensor_parallel_by_hand.cc");
//
// Throws Error, which names the file, if there is no such part or it does not end.
#pragma once

#include <string>
#include <string_view>

namespace phalanx::lecture {

/// Without the indentation that all its lines share; ends with a line break.
std::string excerpt(std::string_view source, std::string_view name, std::string_view file);

}  // namespace phalanx::lecture
