// Errors as text that goes to other processes, where the same class is thrown again.
//
//   note = comm.broadcast_bytes(error_note(error));   // on the rank that failed
//   throw_noted(note, "rank 3: ");                    // on the others
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace phalanx {

/// Never empty. What is no error of Phalanx becomes an Error.
std::string error_note(const std::exception& error);

/// Throws what the note tells of, `prefix` before its message. A text that is no note is a std::invalid_argument.
[[noreturn]] void throw_noted(std::string_view note, std::string_view prefix = "");

}  // namespace phalanx
