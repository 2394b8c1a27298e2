// The frozen base of a run in NF4 ([lora] base_dtype = "nf4"). Each of its matrices is made of the whole wide one, one
// at a time, so that the bytes are the same in every layout; a rank then keeps its part.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/checkpoint/weights.h"
#include "phalanx/config/config.h"
#include "phalanx/tensor/named.h"
#include "phalanx/train/model/parallel_model.h"

namespace phalanx::train {

/// The matrices in 4 bits of a model with random weights. Call it after ParallelModel::initialise(). Does nothing for
/// another base.
void initialise_nf4_base(const config::TrainConfig& config, ParallelModel& model);

/// Those of `weights` that are no part of a matrix in 4 bits.
std::vector<NamedTensor> without_nf4(const config::TrainConfig& config, const std::vector<NamedTensor>& weights);

/// Fills the matrices in 4 bits among `weights` from files: from 4-bit ones of bitsandbytes as they are, from others by
/// quantising them. `options`: as for the other weights. Returns the bytes that were read. Throws CheckpointError as of
/// load_weights() and BitsAndBytesFiles::read().
std::uint64_t load_nf4_base(const config::TrainConfig& config, const std::filesystem::path& path,
                            const std::vector<NamedTensor>& weights, const LoadWeightsOptions& options);

/// Throws CheckpointError if the files hold 4-bit matrices, and the run has a base of another kind.
void refuse_nf4_files(const config::TrainConfig& config, const std::filesystem::path& path);

}  // namespace phalanx::train
