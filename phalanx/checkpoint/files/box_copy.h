// Copies the elements that two boxes of one tensor share, between the bytes of the two boxes. It does not use torch.
//
// Each side is a dense row-major array of its box's shape: a tensor in a file, and the part of the tensor that a caller
// wants. However the two are cut, only the shared runs of bytes are touched.
//
//   copy_overlap(saved_box, bytes_in_file, my_box, buffer, 4);   // float32
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "phalanx/layout/box.h"

namespace phalanx {

/// Returns the number of bytes copied.
/// REQUIRES: each span holds all elements of its box.
std::uint64_t copy_overlap(const Box& source_box, std::span<const std::byte> source, const Box& target_box,
                           std::span<std::byte> target, std::size_t element_size);

/// The same for a part that is in both boxes.
std::uint64_t copy_part(const Box& part, const Box& source_box, std::span<const std::byte> source,
                        const Box& target_box, std::span<std::byte> target, std::size_t element_size);

/// Rows `begin` to `end` of the box. A box without dimensions has one row, itself.
Box rows_of_box(const Box& box, std::int64_t begin, std::int64_t end);
std::int64_t row_count(const Box& box);

/// Cuts the box into chunks of at most `max_elements` (at least 1), consecutive in row-major order. With it a tensor of
/// any shape can be streamed through a small buffer. An empty box has no chunks.
void for_each_chunk(const Box& box, std::int64_t max_elements, const std::function<void(const Box&)>& use);

}  // namespace phalanx
