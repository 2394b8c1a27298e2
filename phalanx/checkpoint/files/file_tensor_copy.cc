#include "phalanx/checkpoint/files/file_tensor_copy.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/files/box_copy.h"

namespace phalanx {
namespace {

constexpr std::int64_t kTile = 32;  // of a transposed copy, so that both sides stay in the cache

Box turned(Box box) {
  std::swap(box.offsets[0], box.offsets[1]);
  std::swap(box.shape[0], box.shape[1]);
  return box;
}

/// The form of the one slice of the file's tensor.
FileTensorView::Form of_slice(FileTensorView::Form form) {
  form.slice = form.slices = 0;
  return form;
}

/// Elements before the slice, in each of a box's rows of slices.
std::size_t slice_elements(const Box& in_file) {
  std::int64_t elements = 1;
  for (std::size_t d = 1; d < in_file.shape.size(); ++d) elements *= in_file.shape[d];
  return static_cast<std::size_t>(elements);
}

Box without_first(const Box& box) {
  return {{box.offsets.begin() + 1, box.offsets.end()}, {box.shape.begin() + 1, box.shape.end()}};
}

bool has_slice(const FileTensorView::Form& form, const Box& in_file) {
  return form.slice >= in_file.offsets[0] && form.slice < in_file.offsets[0] + in_file.shape[0];
}

/// Rows of the tensor are every form.parts-th row of the file's (its columns, if transposed). Copies the elements of
/// `box` that are in `in_file`, from or to the file's bytes.
template <bool kFromFile, class FileByte, class Byte>
std::uint64_t copy_alternate(const FileTensorView::Form& form, const Box& in_file, std::span<FileByte> file,
                             const Box& box, std::span<Byte> own, std::size_t size) {
  const bool is_matrix = box.shape.size() == 2;
  const std::int64_t rows = box.shape[0], columns = is_matrix ? box.shape[1] : 1;
  const std::size_t row_dim = form.transposed ? 1 : 0, column_dim = 1 - row_dim;
  const std::int64_t file_width = is_matrix ? in_file.shape[1] : 1;
  std::uint64_t copied = 0;
  const auto copy = [&](std::int64_t r, std::int64_t c) {
    const std::int64_t file_row = (box.offsets[0] + r) * form.parts + form.part - in_file.offsets[row_dim];
    const std::int64_t file_column = is_matrix ? box.offsets[1] + c - in_file.offsets[column_dim] : 0;
    if (file_row < 0 || file_row >= in_file.shape[row_dim]) return;
    if (is_matrix && (file_column < 0 || file_column >= in_file.shape[column_dim])) return;
    const std::int64_t place =
        form.transposed ? file_column * file_width + file_row : file_row * file_width + file_column;
    FileByte* const there = file.data() + static_cast<std::size_t>(place) * size;
    Byte* const here = own.data() + static_cast<std::size_t>(r * columns + c) * size;
    if constexpr (kFromFile) {
      std::memcpy(here, there, size);
    } else {
      std::memcpy(there, here, size);
    }
    copied += size;
  };
  for (std::int64_t row = 0; row < rows; row += kTile) {
    for (std::int64_t column = 0; column < columns; column += kTile) {
      for (std::int64_t r = row; r < std::min(rows, row + kTile); ++r) {
        for (std::int64_t c = column; c < std::min(columns, column + kTile); ++c) copy(r, c);
      }
    }
  }
  return copied;
}

std::int64_t rows_of_part(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape) {
  return shape[0] / form.span;
}

// The position of a box of the tensor among all parts, before transposing.
Box among_parts(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape, Box box) {
  if (form.parts > 1) box.offsets[0] += form.part * rows_of_part(form, shape);
  return box;
}

// Like copy_overlap(), but source_box is transposed: its rows are columns of the target.
std::uint64_t copy_overlap_transposed(const Box& source_box, std::span<const std::byte> source, const Box& target_box,
                                      std::span<std::byte> target, std::size_t element_size) {
  const auto common = intersect(turned(source_box), target_box);
  if (!common) return 0;
  const Box from = relative_to(turned(*common), source_box), to = relative_to(*common, target_box);
  const std::int64_t rows = common->shape[0], columns = common->shape[1];
  const auto at = [&](const Box& part, const Box& whole, std::int64_t row, std::int64_t column) {
    return static_cast<std::size_t>((part.offsets[0] + row) * whole.shape[1] + part.offsets[1] + column) * element_size;
  };
  for (std::int64_t row = 0; row < rows; row += kTile) {
    for (std::int64_t column = 0; column < columns; column += kTile) {
      for (std::int64_t r = row; r < std::min(rows, row + kTile); ++r) {
        for (std::int64_t c = column; c < std::min(columns, column + kTile); ++c) {
          std::memcpy(target.data() + at(to, target_box, r, c), source.data() + at(from, source_box, c, r),
                      element_size);
        }
      }
    }
  }
  return static_cast<std::uint64_t>(common->numel()) * element_size;
}

std::uint64_t copy_part(bool transposed, const Box& source_box, std::span<const std::byte> source,
                        const Box& target_box, std::span<std::byte> target, std::size_t element_size) {
  return transposed ? copy_overlap_transposed(source_box, source, target_box, target, element_size)
                    : copy_overlap(source_box, source, target_box, target, element_size);
}

}  // namespace

std::vector<std::int64_t> shape_in_file(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape) {
  if ((form.transposed && shape.size() != 2) || (form.parts > 1 && (shape.empty() || shape[0] % form.span != 0))) {
    throw Error(fmt::format("a tensor of {} dimensions is said to lie {}in a file as parts {} to {} of {}",
                            shape.size(), form.transposed ? "transposed " : "", form.part, form.part + form.span - 1,
                            form.parts));
  }
  if (form.alternate && (form.span != 1 || shape.empty() || shape.size() > 2)) {
    throw Error(fmt::format("a tensor of {} dimensions is said to alternate with others in a file, as {} parts of it",
                            shape.size(), form.span));
  }
  if (form.slices > 0) {
    std::vector<std::int64_t> result = shape_in_file(of_slice(form), shape);
    result.insert(result.begin(), form.slices);
    return result;
  }
  std::vector<std::int64_t> result = shape;
  if (form.parts > 1) result[0] = rows_of_part(form, shape) * form.parts;
  if (form.transposed) std::swap(result[0], result[1]);
  return result;
}

std::uint64_t copy_from_view(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape,
                             std::span<const std::byte> file, const Box& box, std::span<std::byte> target,
                             std::size_t element_size) {
  if (form.slices > 0) {
    const std::size_t bytes = file.size() / static_cast<std::size_t>(form.slices);
    return copy_from_view(of_slice(form), shape, file.subspan(static_cast<std::size_t>(form.slice) * bytes, bytes), box,
                          target, element_size);
  }
  const Box whole{std::vector<std::int64_t>(shape.size(), 0), shape_in_file(form, shape)};
  if (form.alternate) return copy_alternate<true>(form, whole, file, box, target, element_size);
  return copy_part(form.transposed, whole, file, among_parts(form, shape, box), target, element_size);
}

Box box_from_file(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape, const Box& in_file) {
  Box nothing{std::vector<std::int64_t>(shape.size(), 0), std::vector<std::int64_t>(shape.size(), 0)};
  if (form.slices > 0) {
    return has_slice(form, in_file) ? box_from_file(of_slice(form), shape, without_first(in_file)) : nothing;
  }
  if (form.alternate) {
    Box box = form.transposed ? turned(in_file) : in_file;
    // The rows that begin at or behind `row` of the file.
    const auto first_from = [&](std::int64_t row) {
      return std::max<std::int64_t>(row - form.part + form.parts - 1, 0) / form.parts;
    };
    const std::int64_t first = first_from(box.offsets[0]), end = first_from(box.offsets[0] + box.shape[0]);
    box.offsets[0] = first;
    box.shape[0] = end - first;
    return box.empty() ? nothing : box;
  }
  const Box whole{std::vector<std::int64_t>(shape.size(), 0), shape};
  auto common = intersect(form.transposed ? turned(in_file) : in_file, among_parts(form, shape, whole));
  if (!common) return nothing;
  if (form.parts > 1) common->offsets[0] -= form.part * rows_of_part(form, shape);
  return *common;
}

void copy_to_view(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape, const Box& box,
                  std::span<const std::byte> source, const Box& in_file, std::span<std::byte> target,
                  std::size_t element_size) {
  if (form.slices > 0) {
    const std::size_t bytes = slice_elements(in_file) * element_size;
    const auto place = static_cast<std::size_t>(form.slice - in_file.offsets[0]) * bytes;
    copy_to_view(of_slice(form), shape, box, source, without_first(in_file), target.subspan(place, bytes),
                 element_size);
    return;
  }
  if (form.alternate) {
    copy_alternate<false>(form, in_file, target, box, source, element_size);
    return;
  }
  copy_part(form.transposed, among_parts(form, shape, box), source, in_file, target, element_size);
}

}  // namespace phalanx
