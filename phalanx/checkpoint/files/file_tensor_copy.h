// Between a tensor and its place in a file of others (layout/file_tensor_view.h): shapes, boxes and bytes. Knows no torch.
//
//   shape_in_file(place.form, {64, 64});                           // part of three, transposed: {64, 192}
//   copy_from_view(place.form, shape, file.bytes(info), box, target, 4);
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "phalanx/layout/box.h"
#include "phalanx/layout/file_tensor_view.h"

namespace phalanx {

/// Of the file's tensor that holds, beside other parts, a tensor of this shape. An Error unless it has dimensions; if
/// it is transposed, two.
std::vector<std::int64_t> shape_in_file(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape);

/// Copies a box of a tensor of this shape out of the file's tensor, whose bytes are `file`; no others are read. Returns
/// how many.
std::uint64_t copy_from_view(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape,
                             std::span<const std::byte> file, const Box& box, std::span<std::byte> target,
                             std::size_t element_size);

/// What of a tensor of this shape lies in a box of the file's tensor; an empty box if nothing does.
Box box_from_file(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape, const Box& in_file);
/// Copies that, dense in `source`, to where it belongs in the box of the file's tensor, dense in `target`.
void copy_to_view(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape, const Box& box,
                  std::span<const std::byte> source, const Box& in_file, std::span<std::byte> target,
                  std::size_t element_size);

}  // namespace phalanx
