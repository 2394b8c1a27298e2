#include "phalanx/layout/box.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "phalanx/base/error.h"

namespace phalanx {

std::int64_t Box::numel() const noexcept {
  std::int64_t product = 1;
  for (const auto size : shape) product *= size;
  return product;
}

bool Box::contains(const Box& other) const noexcept {
  if (other.shape.size() != shape.size()) return false;
  for (std::size_t d = 0; d < shape.size(); ++d)
    if (other.offsets[d] < offsets[d] || other.offsets[d] + other.shape[d] > offsets[d] + shape[d]) return false;
  return !other.empty();
}

std::string Box::text() const {
  std::string text;
  for (std::size_t d = 0; d < shape.size(); ++d)
    text += fmt::format("{}{}:{}", d == 0 ? "" : ", ", offsets[d], offsets[d] + shape[d]);
  return "[" + text + "]";
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  if (a.shape.size() != b.shape.size())
    throw Error(fmt::format("boxes {} and {} are of tensors with different numbers of dimensions", a.text(), b.text()));
  Box common = a;
  for (std::size_t d = 0; d < a.shape.size(); ++d) {
    common.offsets[d] = std::max(a.offsets[d], b.offsets[d]);
    common.shape[d] = std::min(a.offsets[d] + a.shape[d], b.offsets[d] + b.shape[d]) - common.offsets[d];
    if (common.shape[d] <= 0) return std::nullopt;
  }
  return common;
}

Box relative_to(const Box& part, const Box& whole) {
  Box relative = part;
  for (std::size_t d = 0; d < part.shape.size(); ++d) relative.offsets[d] -= whole.offsets[d];
  return relative;
}

std::vector<FlatRange> flat_ranges(const Box& box, const std::vector<std::int64_t>& tensor_shape) {
  if (box.shape.size() != tensor_shape.size())
    throw Error(fmt::format("box {} is of a tensor with another number of dimensions than [{}]", box.text(),
                            fmt::join(tensor_shape, ", ")));
  if (box.empty()) return {};
  // The innermost dimensions that the box covers completely, and the next one outside of them, form one range.
  std::size_t inner = box.shape.size();
  std::int64_t length = 1, stride = 1;  // stride: elements of the tensor between neighbours in dimension `inner`
  while (inner > 0) {
    --inner;
    length *= box.shape[inner];
    if (box.shape[inner] != tensor_shape[inner]) break;
    stride *= tensor_shape[inner];
  }
  std::vector<FlatRange> ranges;
  std::int64_t first = box.shape.empty() ? 0 : box.offsets[inner] * stride;
  std::vector<std::int64_t> strides(inner);
  if (!box.shape.empty()) stride *= tensor_shape[inner];
  for (std::size_t d = inner; d-- > 0; stride *= tensor_shape[d]) {
    strides[d] = stride;
    first += box.offsets[d] * stride;
  }
  std::vector<std::int64_t> index(inner, 0);
  for (;;) {
    std::int64_t begin = first;
    for (std::size_t d = 0; d < inner; ++d) begin += index[d] * strides[d];
    ranges.push_back({begin, length});
    std::size_t d = inner;
    while (d > 0 && ++index[d - 1] == box.shape[d - 1]) index[--d] = 0;
    if (d == 0) return ranges;
  }
}

}  // namespace phalanx
