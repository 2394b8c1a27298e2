// Collects the differences between the tensors that a model needs and those in a file, for one readable error.
//
//   Mismatches differences;
//   if (!found) differences.missing(wanted);
//   differences.throw_if_any("checkpoint/step-100 does not fit this model");
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "phalanx/checkpoint/files/safetensors.h"

namespace phalanx {

class Mismatches {
 public:
  void missing(const safetensors::TensorInfo& wanted);
  void unexpected(const safetensors::TensorInfo& found);
  void differs(const safetensors::TensorInfo& wanted, const safetensors::TensorInfo& found);
  void other(std::string line);

  /// Throws CheckpointError with the headline, the first few lines, the number of the others, and then the advice.
  void throw_if_any(const std::string& headline, const std::string& advice = "") const;

 private:
  std::vector<std::string> lines_;
  std::size_t count_ = 0;
};

/// "F32 [256, 256]".
std::string describe_type(const safetensors::TensorInfo& tensor);

}  // namespace phalanx
