// Box: a rectangular part of a global tensor. It does not use torch.
//
// The part of a tensor that a rank holds is always one box, even if the tensor is sharded along several dimensions. A
// box may be empty: a size is 0 in some dimension, and its offset says where it would begin. A tensor without
// dimensions has one box, {}, {}, of one element. Offsets and sizes count elements.
//
//   const Box mine{{4, 0}, {2, 8}};                    // rows 4 and 5 of a matrix of 8 columns
//   if (const auto common = intersect(mine, saved))    // nullopt if they share no element
//     for (const auto& range : flat_ranges(*common, {10, 8})) read(range.begin, range.length);
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace phalanx {

struct Box {
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> shape;

  std::int64_t numel() const noexcept;
  bool empty() const noexcept { return numel() == 0; }
  /// True if the other box is not empty, has the same number of dimensions, and is inside this box.
  bool contains(const Box& other) const noexcept;
  std::string text() const;  // [4:6, 0:8]; for a tensor without dimensions: []
  bool operator==(const Box&) const = default;
};

/// The intersection of two boxes of the same tensor; nullopt if it has no element. Throws Error if their numbers of
/// dimensions differ.
std::optional<Box> intersect(const Box& a, const Box& b);

/// `part` in the coordinates of `whole`, which contains it: how to slice it out of the tensor that holds `whole`.
Box relative_to(const Box& part, const Box& whole);

/// Elements [begin, begin + length) of a row-major tensor.
struct FlatRange {
  std::int64_t begin = 0;
  std::int64_t length = 0;
  bool operator==(const FlatRange&) const = default;
};

/// The box as ranges of the flattened tensor of that shape, in ascending order and as few as possible: adjacent full
/// rows are one range. Concatenated, the ranges are the elements of the box in row-major order.
std::vector<FlatRange> flat_ranges(const Box& box, const std::vector<std::int64_t>& tensor_shape);

}  // namespace phalanx
