#include "phalanx/checkpoint/files/box_copy.h"

#include <algorithm>
#include <cstring>

namespace phalanx {

std::uint64_t copy_overlap(const Box& source_box, std::span<const std::byte> source, const Box& target_box,
                           std::span<std::byte> target, std::size_t element_size) {
  const auto common = intersect(source_box, target_box);
  return common ? copy_part(*common, source_box, source, target_box, target, element_size) : 0;
}

std::uint64_t copy_part(const Box& part, const Box& source_box, std::span<const std::byte> source,
                        const Box& target_box, std::span<std::byte> target, std::size_t element_size) {
  // Both lists cover the same elements in the same order, in runs as long as each side allows.
  const auto from = flat_ranges(relative_to(part, source_box), source_box.shape);
  const auto to = flat_ranges(relative_to(part, target_box), target_box.shape);
  std::size_t f = 0, t = 0;
  std::int64_t f_done = 0, t_done = 0;
  while (f < from.size()) {
    const std::int64_t length = std::min(from[f].length - f_done, to[t].length - t_done);
    const auto bytes = static_cast<std::size_t>(length) * element_size;
    std::memcpy(target.data() + static_cast<std::size_t>(to[t].begin + t_done) * element_size,
                source.data() + static_cast<std::size_t>(from[f].begin + f_done) * element_size, bytes);
    if ((f_done += length) == from[f].length) ++f, f_done = 0;
    if ((t_done += length) == to[t].length) ++t, t_done = 0;
  }
  return static_cast<std::uint64_t>(part.numel()) * element_size;
}

std::int64_t row_count(const Box& box) { return box.shape.empty() ? 1 : box.shape[0]; }

Box rows_of_box(const Box& box, std::int64_t begin, std::int64_t end) {
  Box rows = box;
  if (rows.shape.empty()) return rows;
  rows.offsets[0] += begin;
  rows.shape[0] = end - begin;
  return rows;
}

void for_each_chunk(const Box& box, std::int64_t max_elements, const std::function<void(const Box&)>& use) {
  if (box.empty()) return;
  if (box.numel() <= max_elements) return use(box);
  // Leading dimensions of size 1 do not affect the order. One index of dimension d has `inner` elements.
  std::size_t d = 0;
  while (box.shape[d] == 1) ++d;
  const std::int64_t inner = box.numel() / box.shape[d], count = std::max<std::int64_t>(1, max_elements / inner);
  for (std::int64_t begin = 0; begin < box.shape[d]; begin += count) {
    Box part = box;
    part.offsets[d] += begin;
    part.shape[d] = std::min(count, box.shape[d] - begin);
    for_each_chunk(part, max_elements, use);
  }
}

}  // namespace phalanx
