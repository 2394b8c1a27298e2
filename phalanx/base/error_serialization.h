// Errors as text that goes to other processes, where the same class is thrown again.
//
//   note = comm.broadcast_bytes(serialize_error(error));   // on the rank that failed
//   throw_serialized_error(note, "rank 3: ");                    // on the others
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace phalanx {

/// Never empty. What is no error of Phalanx becomes an Error.
std::string serialize_error(const std::exception& error);

/// Throws what the note tells of, `prefix` before its message. A text that is no note is a std::invalid_argument.
[[noreturn]] void throw_serialized_error(std::string_view serialized, std::string_view prefix = "");

}  // namespace phalanx
