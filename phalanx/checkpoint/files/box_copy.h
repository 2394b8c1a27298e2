// Copies what two boxes of one tensor share, between the bytes of each. Knows no torch tensor.
//
// Each side is a dense row-major array of its own box's shape: a tensor as it lies in a file, and the part of the
// tensor that somebody wants. Whatever way the two are cut, only the shared runs of bytes are touched.
//
//   copy_overlap(saved_box, bytes_in_file, my_box, buffer, 4);   // float32
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "phalanx/layout/box.h"

namespace phalanx {

/// Returns the number of bytes copied. The spans must hold all elements of their boxes.
std::uint64_t copy_overlap(const Box& source_box, std::span<const std::byte> source, const Box& target_box,
                           std::span<std::byte> target, std::size_t element_size);

/// The same of a part that both boxes have.
std::uint64_t copy_part(const Box& part, const Box& source_box, std::span<const std::byte> source,
                        const Box& target_box, std::span<std::byte> target, std::size_t element_size);

/// The box's elements from row `begin` to row `end` of it; a box without dimensions has one row, itself.
Box rows_of_box(const Box& box, std::int64_t begin, std::int64_t end);
std::int64_t row_count(const Box& box);

/// The box in pieces of at most `max_elements` (at least 1), whose elements follow each other in row-major order: to
/// stream a tensor of any shape through a small buffer. An empty box has none.
void for_each_chunk(const Box& box, std::int64_t max_elements, const std::function<void(const Box&)>& use);

}  // namespace phalanx
