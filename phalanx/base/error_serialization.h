// Converts errors to text and back, so that another process can throw the same class.
//
//   note = comm.broadcast_bytes(serialize_error(error));  // on the rank that failed
//   throw_serialized_error(note, "rank 3: ");             // on the others
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace phalanx {

/// The result is never empty. An exception that is not a Phalanx error becomes an Error.
std::string serialize_error(const std::exception& error);

/// Throws the serialized error, with `prefix` before its message. Throws std::invalid_argument if the text is not a
/// serialized error.
[[noreturn]] void throw_serialized_error(std::string_view serialized, std::string_view prefix = "");

}  // namespace phalanx
