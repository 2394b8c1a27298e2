// Files of raw ids say nothing of themselves: what can be seen of whether they are ids, and of what type.
//
// They look at the file's content alone and only at a part of a large one. They find the mistakes that are
// made: a file of another kind, ids of another width, another byte order, floating-point numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "phalanx/data/token_file.h"

namespace phalanx::data {

/// DataError where the content is that of another kind of file: text, compressed data, an array, a table, a model. Says
/// what it is and which command turns it into token ids.
void refuse_other_kinds(std::span<const std::byte> file, const std::string& path);

/// Whether all that is looked at is 0, as in a file that was given its size and nothing more.
bool was_never_written(std::span<const std::byte> file);

/// Why ids of this type cannot be what the file holds: "every second token is 0, as in ids stored as uint32". Nothing
/// where there is no doubt.
std::optional<std::string> doubt_about_type(std::span<const std::byte> file, TokenType type);

/// The types, but for `besides`, by which all ids that were looked at are below `vocab_size`: "uint32", "uint32 or
/// int64", "" for none.
std::string types_that_fit(std::span<const std::byte> file, std::int64_t vocab_size, TokenType besides);

}  // namespace phalanx::data
