#include "phalanx/checkpoint/files/file_tensor_copy.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/files/box_copy.h"

namespace phalanx {
namespace {

Box turned(Box box) {
  std::swap(box.offsets[0], box.offsets[1]);
  std::swap(box.shape[0], box.shape[1]);
  return box;
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
  constexpr std::int64_t kTile = 32;  // so that both sides stay in the cache
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
  std::vector<std::int64_t> result = shape;
  if (form.parts > 1) result[0] = rows_of_part(form, shape) * form.parts;
  if (form.transposed) std::swap(result[0], result[1]);
  return result;
}

std::uint64_t copy_from_view(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape,
                             std::span<const std::byte> file, const Box& box, std::span<std::byte> target,
                             std::size_t element_size) {
  const Box whole{std::vector<std::int64_t>(shape.size(), 0), shape_in_file(form, shape)};
  return copy_part(form.transposed, whole, file, among_parts(form, shape, box), target, element_size);
}

Box box_from_file(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape, const Box& in_file) {
  const Box whole{std::vector<std::int64_t>(shape.size(), 0), shape};
  auto common = intersect(form.transposed ? turned(in_file) : in_file, among_parts(form, shape, whole));
  if (!common) return {std::vector<std::int64_t>(shape.size(), 0), std::vector<std::int64_t>(shape.size(), 0)};
  if (form.parts > 1) common->offsets[0] -= form.part * rows_of_part(form, shape);
  return *common;
}

void copy_to_view(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape, const Box& box,
                  std::span<const std::byte> source, const Box& in_file, std::span<std::byte> target,
                  std::size_t element_size) {
  copy_part(form.transposed, among_parts(form, shape, box), source, in_file, target, element_size);
}

}  // namespace phalanx
