// Checks files of raw ids, which do not describe themselves: can the content be ids, and of what type?
//
// The checks look only at the file's content, and only at a part of a large file. They find the mistakes that users
// make: a file of another kind, ids of another width, another byte order, floating-point numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "phalanx/data/token_file.h"

namespace phalanx::data {

/// Throws DataError if the content is of another kind: text, compressed data, an array, a table, a model. The error
/// says what it is and which command converts it to token ids.
void refuse_other_kinds(std::span<const std::byte> file, const std::string& path);

/// Whether everything that is looked at is 0, as in a file that was given its size and never written.
bool was_never_written(std::span<const std::byte> file);

/// Returns why the file cannot hold ids of this type: "every second token is 0, as in ids stored as uint32". Returns
/// nothing if there is no doubt.
std::optional<std::string> doubt_about_type(std::span<const std::byte> file, TokenType type);

/// Returns the types, except `besides`, by which all ids that were looked at are below `vocab_size`: "uint32", "uint32
/// or int64"; "" for none.
std::string types_that_fit(std::span<const std::byte> file, std::int64_t vocab_size, TokenType besides);

}  // namespace phalanx::data
