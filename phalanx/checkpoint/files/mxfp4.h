// Matrices in MXFP4, as GPT-OSS's released experts are (OCP Microscaling Formats, 2023): numbers of 4 bits (E2M1), and
// for each 32 of a row one power of two (E8M0). It does not use torch.
//
// The matrix "gate_up_proj" of the view's form is saved as gate_up_proj_blocks, bytes [slices, rows, columns / 32, 16],
// and gate_up_proj_scales, bytes [slices, rows, columns / 32]. The lower half of a byte is the first of two neighbours.
// The rows are those of the tensor, whether the form is transposed or not: that is how wider files keep the matrix.
//
//   const Mxfp4Shapes shapes = mxfp4_shapes(form, {hidden, dim});
//   decode_mxfp4(form, shape, blocks, scales, box, target);
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "phalanx/layout/box.h"
#include "phalanx/layout/file_tensor_view.h"

namespace phalanx {

inline constexpr std::int64_t kMxfp4Block = 32;

struct Mxfp4Shapes {
  std::vector<std::int64_t> blocks, scales;
};
/// Of the file's tensors that hold a tensor of this shape. Empty if there are no such: it is no matrix of whole blocks.
Mxfp4Shapes mxfp4_shapes(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape);

/// Writes a box of a tensor of this shape to `target`, as fp32. Returns how many bytes it read.
/// REQUIRES: files' bytes of the shapes above; mxfp4_shapes() are not empty.
std::uint64_t decode_mxfp4(const FileTensorView::Form& form, const std::vector<std::int64_t>& shape,
                           std::span<const std::byte> blocks, std::span<const std::byte> scales, const Box& box,
                           std::span<std::byte> target);

}  // namespace phalanx
