// Matrices in NF4 (kernels/nf4.h): read from files of bitsandbytes, and made wide again.
//
// bitsandbytes writes for the matrix "q_proj.weight": that name with the codes, and behind it .absmax, .nested_absmax,
// .quant_map, .nested_quant_map and .quant_state.bitsandbytes__nf4. Phalanx keeps the same bytes as the parameters
// "wq.weight", "wq.weight_absmax" and "wq.weight_nested".
//
//   const BitsAndBytesFiles files("model-4bit");
//   if (files.has(name)) stored = files.read(name, rows, columns, tables);
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/kernels/nf4.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

class BitsAndBytesFiles {
 public:
  /// Reads headers alone. A step directory of Phalanx has no such matrices.
  explicit BitsAndBytesFiles(const std::filesystem::path& path);

  /// Names of matrices, as in the files; empty: none is in 4 bits.
  const std::vector<std::string>& names() const noexcept { return names_; }
  bool has(const std::string& name) const;
  /// Whether a name in the files is behind that of one of these matrices, and no weight of its own.
  bool is_part(const std::string& name) const;

  /// Throws CheckpointError that names file and tensor: for FP4, for other blocks than 64 and 256, without double
  /// quantisation, for other codes than kernels::Nf4Tables has, and for another shape.
  kernels::Nf4Weight read(const std::string& name, std::int64_t rows, std::int64_t columns,
                          std::shared_ptr<const kernels::Nf4Tables> tables) const;

 private:
  struct Found {
    const safetensors::File* file = nullptr;
    const safetensors::TensorInfo* info = nullptr;
  };
  Found find(const std::string& name) const;
  Found part(const std::string& name, const std::string& suffix, safetensors::Dtype dtype, std::int64_t elements) const;

  std::vector<safetensors::File> files_;
  std::vector<std::string> names_;
};

/// The tensors, where every three that are a matrix in NF4 are one in fp32, under the name of its codes.
/// REQUIRES: whole tensors, not a rank's parts.
std::vector<NamedTensor> dense_weights(const std::vector<NamedTensor>& tensors);

}  // namespace phalanx
