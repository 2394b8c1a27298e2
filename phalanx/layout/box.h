// Box: a rectangular part of a global tensor. Knows no torch.
//
// All that a rank holds of a tensor is one box, also when the tensor is cut along several dimensions. A box may be
// empty (a size of 0 in some dimension; its offset then says where it would begin). A tensor without dimensions has one
// box, {}, {}, of one element. Offsets and sizes count elements.
//
//   const Box mine{{4, 0}, {2, 8}};                    // rows 4 and 5 of a matrix of 8 columns
//   if (const auto common = intersect(mine, saved))    // nothing where they share no element
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
  /// Whether the other, not empty, lies wholly in this one. The numbers of dimensions must agree.
  bool contains(const Box& other) const noexcept;
  std::string text() const;  // [4:6, 0:8]; of a tensor without dimensions: []
  bool operator==(const Box&) const = default;
};

/// What two boxes of the same tensor share; nothing if that is no element. Throws Error if their dimensions differ.
std::optional<Box> intersect(const Box& a, const Box& b);

/// The same part, seen from a box that contains it: how to cut it out of that box's own tensor.
Box relative_to(const Box& part, const Box& whole);

/// Elements [begin, begin + length) of a tensor that lies row-major.
struct FlatRange {
  std::int64_t begin = 0;
  std::int64_t length = 0;
  bool operator==(const FlatRange&) const = default;
};

/// The box as ranges of the flat tensor of that shape, in ascending order and as few as possible: whole rows are one
/// range. Read one after the other they are the box's own elements, row-major.
std::vector<FlatRange> flat_ranges(const Box& box, const std::vector<std::int64_t>& tensor_shape);

}  // namespace phalanx
