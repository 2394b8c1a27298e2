// RowSquares: adds up the squares of many rows of float32 or 16-bit values in memory, on several threads. The bits do
// not depend on the number of threads: sum_of_squares() sums each row, and the rows' sums are added exactly.
//
//   RowSquares squares;
//   squares.add_rows(grad);             // a contiguous CPU tensor; it must live until sum()
//   ExactSum sum = squares.sum();
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "phalanx/optim/exact_sum.h"

namespace phalanx {

class RowSquares {
 public:
  static bool takes(at::ScalarType dtype) {
    return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  }
  /// A row is what one index of dimension 0 selects. A tensor without dimensions is one row of one element.
  /// REQUIRES: `tensor` is a contiguous CPU tensor and lives until sum().
  void add_rows(const at::Tensor& tensor);
  ExactSum sum() const;

 private:
  // Consecutive rows, or one block of a long row.
  struct Part {
    const void* values;
    at::ScalarType dtype;
    std::int64_t rows, length;
  };
  static void add_part(const Part& part, std::vector<float>& widened, ExactSum& sum);

  std::vector<Part> parts_;
};

}  // namespace phalanx
