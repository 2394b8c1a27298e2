// Copies between a tensor and its view in a file of another program (layout/file_tensor_view.h): shapes, boxes and
// bytes. It does not use torch.
//
//   shape_in_file(view.form, {64, 64});                           // part of three, transposed: {64, 192}
//   copy_from_view(view.form, shape, file.bytes(info), box, target, 4);
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "phalanx/layout/box.h"
#include "phalanx/layout/file_tensor_view.h"

namespace phalanx {

/// The shape of the file's tensor that holds a tensor of this shape, and maybe other parts. Throws Error unless `shape`
/// has dimensions; if the view is transposed, it needs two.
std::vector<std::int64_t> shape_in_file(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape);

/// Copies a box of a tensor of this shape out of the file's tensor, whose bytes are `file`. It reads no other bytes.
/// Returns how many it read.
std::uint64_t copy_from_view(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape,
                             std::span<const std::byte> file, const Box& box, std::span<std::byte> target,
                             std::size_t element_size);

/// The part of a tensor of this shape that is inside a box of the file's tensor; an empty box if there is none.
Box box_from_file(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape, const Box& in_file);
/// Copies that part, dense in `source`, to its position in the box of the file's tensor, dense in `target`.
void copy_to_view(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape, const Box& box,
                  std::span<const std::byte> source, const Box& in_file, std::span<std::byte> target,
                  std::size_t element_size);

}  // namespace phalanx
