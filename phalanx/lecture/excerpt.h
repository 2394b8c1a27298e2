// Takes a part of a C++ source: a function, or some lines.
//
//   function_of(source, "by_columns", "recipes/tensor_parallel_by_hand.cc");
//   functions_of(source, "forward", "backward", "recipes/pipeline_by_hand.h");
//   lines_of(source, "Mesh mesh(", "sharded.initialise(", "recipes/llama_sharded_tensor_parallel.cc");
//
// The result is without the indentation that all its lines share, and ends with a line break. All throw Error, which
// names the file, if there is no such part.
#pragma once

#include <string>
#include <string_view>

namespace phalanx::lecture {

/// The first function of that name, with the comment right above it.
std::string function_of(std::string_view source, std::string_view name, std::string_view file);

/// From the function `first` to the function `last`, with what lies between them.
std::string functions_of(std::string_view source, std::string_view first, std::string_view last, std::string_view file);

/// From the first line that contains `first` to the next one that contains `last`.
std::string lines_of(std::string_view source, std::string_view first, std::string_view last, std::string_view file);

}  // namespace phalanx::lecture
