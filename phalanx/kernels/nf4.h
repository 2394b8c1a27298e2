// NF4: frozen weights in 4 bits, as QLoRA (arXiv:2305.14314) and bitsandbytes store them.
//
// Blocks of 64 neighbouring elements of a row share a scale, the largest magnitude among them. An element is the
// nearest of 16 multiples of that scale. The scales, less their mean (the offset), are stored in 8 bits: 256
// neighbouring ones share a scale of their own in fp32. That is 4.13 bits an element.
//
//   const Nf4Weight stored = quantise_nf4(weight, tables);                       // [rows, columns], columns of 64
//   at::Tensor y = nf4_linear(x, stored, {.columns = weight.size(1)});           // x W^T
//
// The bytes are those of bitsandbytes with double quantisation: of two elements in a byte the first is in the high
// half. The products widen the weight, and again for the input's gradient; nothing wide is kept in between, and of fp32
// products on the host only some rows are wide at a time (wide_rows.h). The host waits for nothing in them.
// quantise_nf4() works on the host: it waits for a weight on a device, and copies the bytes back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "phalanx/layout/nf4_blocks.h"

namespace phalanx::kernels {

/// The values of codes, on the device of the weights. make() copies them from the host.
struct Nf4Tables {
  at::Tensor values;  // fp32 [16]
  at::Tensor scales;  // fp32 [256]: of scales, in units of nested ones
  static std::shared_ptr<const Nf4Tables> make(at::Device device);
};

/// A matrix, or a part of one: whole rows, or whole blocks of each row.
struct Nf4Weight {
  at::Tensor codes;   // uint8 [rows, columns / 2]
  at::Tensor absmax;  // uint8 [rows, columns / 64]
  at::Tensor nested;  // uint8: the bytes of fp32 numbers, the nested scales of the whole matrix and then the offset
                      // (nf4_nested_bytes())
  std::shared_ptr<const Nf4Tables> tables;
};

/// Where a part lies: blocks are numbered row by row in the whole matrix.
struct Nf4Part {
  std::int64_t first_row = 0, first_column = 0;
  std::int64_t columns = 0;  // of the whole matrix
};

/// Of a whole matrix [rows, columns]. The same bits for any number of threads.
/// REQUIRES: columns are a multiple of kNf4Block.
Nf4Weight quantise_nf4(const at::Tensor& weight, std::shared_ptr<const Nf4Tables> tables);

/// [rows, columns of the part] in `dtype`.
at::Tensor dequantise_nf4(const Nf4Weight& weight, const Nf4Part& part, at::ScalarType dtype);

/// x W^T + b in the type of x, or of autocast. x [..., in], bias [out] or undefined -> [..., out].
at::Tensor nf4_linear(const at::Tensor& x, const Nf4Weight& weight, const Nf4Part& part, const at::Tensor& bias = {});

}  // namespace phalanx::kernels
