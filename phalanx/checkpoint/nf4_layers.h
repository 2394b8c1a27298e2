// The layers of a model whose weights are in NF4: each is made of the whole matrix, one at a time, so that the bytes
// are the same in every layout; a rank then keeps its part.
//
//   const auto layers = models::nf4_layers(config, lora);
//   load_weights(path, without_nf4_parts(layers, weights), options);
//   load_nf4_layers(path, layers, weights, options);
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "phalanx/checkpoint/weights.h"
#include "phalanx/kernels/nf4.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

/// Is asked for the matrices of which this rank has a part.
using MakeNf4 = std::function<kernels::Nf4Weight(const std::string& layer, std::int64_t rows, std::int64_t columns)>;
void fill_nf4_parts(const std::vector<std::string>& layers, const std::vector<NamedTensor>& weights,
                    const MakeNf4& make);

/// Those of `weights` that are no part of such a matrix.
std::vector<NamedTensor> without_nf4_parts(const std::vector<std::string>& layers,
                                           const std::vector<NamedTensor>& weights);

/// The weight whose scales these are ("w1.weight_absmax" -> "w1.weight"), or the name itself.
std::string weight_of_nf4_scales(const std::string& name);

/// Fills the parts among `weights` from files: from 4-bit matrices of bitsandbytes as they are, from others by
/// quantising them. `options`: as for the other weights. Returns the bytes that were read. Throws CheckpointError as of
/// load_weights() and BitsAndBytesFiles::read().
std::uint64_t load_nf4_layers(const std::filesystem::path& path, const std::vector<std::string>& layers,
                              const std::vector<NamedTensor>& weights, const LoadWeightsOptions& options);

}  // namespace phalanx
