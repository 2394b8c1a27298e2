// Which parameters are matrices inside of blocks: what Muon steps. Torch-free.
#pragma once

#include <cstddef>
#include <string_view>

namespace phalanx::models {

/// Whether a parameter of so many dimensions is a matrix of a block, of its adapters and experts too, and no router.
/// Embeddings and the output layer are in no block.
inline bool is_block_matrix(std::string_view name, std::size_t dimensions) {
  return dimensions == 2 && name.starts_with("layers.") && !name.ends_with(".gate.weight");
}

}  // namespace phalanx::models
