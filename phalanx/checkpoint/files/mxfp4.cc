#include "phalanx/checkpoint/files/mxfp4.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

namespace phalanx {
namespace {

constexpr std::int64_t kBias = 127;      // of the exponents
constexpr std::uint8_t kNoScale = 0xff;  // not a number
constexpr std::array<float, 16> kValues = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                           -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

float scale_of(std::byte saved) {
  const auto exponent = std::to_integer<std::uint8_t>(saved);
  if (exponent == kNoScale) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.0F, static_cast<int>(exponent) - static_cast<int>(kBias));
}

std::int64_t rows_in_file(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape) {
  return shape[0] / form.span * form.parts;
}

}  // namespace

Mxfp4Shapes mxfp4_shapes(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape) {
  if (shape.size() != 2 || shape[1] % kMxfp4Block != 0 || form.span != 1) return {};
  Mxfp4Shapes shapes{.blocks = {rows_in_file(form, shape), shape[1] / kMxfp4Block, kMxfp4Block / 2},
                     .scales = {rows_in_file(form, shape), shape[1] / kMxfp4Block}};
  if (form.slices > 0) {
    shapes.blocks.insert(shapes.blocks.begin(), form.slices);
    shapes.scales.insert(shapes.scales.begin(), form.slices);
  }
  return shapes;
}

std::uint64_t decode_mxfp4(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape,
                           std::span<const std::byte> blocks, std::span<const std::byte> scales, const Box& box,
                           std::span<std::byte> target) {
  const std::int64_t columns = shape[1], first_column = box.offsets[1], end_column = first_column + box.shape[1];
  std::byte* to = target.data();
  for (std::int64_t r = box.offsets[0]; r < box.offsets[0] + box.shape[0]; ++r) {
    const std::int64_t place = form.alternate ? r * form.parts + form.part : form.part * shape[0] + r;
    const auto row = static_cast<std::size_t>(form.slice * rows_in_file(form, shape) + place);
    const std::byte* const codes = blocks.data() + row * static_cast<std::size_t>(columns / 2);
    const std::byte* const exponents = scales.data() + row * static_cast<std::size_t>(columns / kMxfp4Block);
    float scale = 0;
    for (std::int64_t c = first_column; c < end_column; ++c) {
      if (c == first_column || c % kMxfp4Block == 0) scale = scale_of(exponents[c / kMxfp4Block]);
      const auto both = std::to_integer<unsigned>(codes[c / 2]);
      const float value = kValues[c % 2 == 0 ? both & 0xfU : both >> 4U] * scale;
      std::memcpy(to, &value, sizeof(value));
      to += sizeof(value);
    }
  }
  return static_cast<std::uint64_t>(box.numel()) / 2 + static_cast<std::uint64_t>(box.numel() / kMxfp4Block);
}

}  // namespace phalanx
