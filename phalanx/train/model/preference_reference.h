// What the reference of a preference tuning ([dpo]) says of the answers: their log-likelihoods by the model with which
// a new run begins, with its adapters if it has some. They are computed once, before the first step, in the run's own
// layout and types, and saved in its checkpoints: a run that goes on has the same ones.
//
//   at::Tensor table = make_reference_table(loader);                 // float64 [pairs, 2] on the host, of zeros
//   compute_reference(*model, *world, loader, table, options);       // collective
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "phalanx/comm/communicator.h"
#include "phalanx/data/data_loader.h"
#include "phalanx/layout/context_cut.h"
#include "phalanx/train/model/parallel_model.h"

namespace phalanx::train {

struct ReferenceOptions {
  std::int64_t local_batch_size = 8;
  std::int64_t data_parallel_rank = 0, data_parallel_size = 1;
  ContextCut cut;  // the positions of this rank
  std::optional<at::ScalarType> autocast;
  at::Device device = at::kCPU;
  std::function<void(std::int64_t rows)> on_rows;  // called after each forward pass, with the rows of all ranks in it
};

/// Row i is of pair i of the file: of the chosen and of the rejected answer.
at::Tensor make_reference_table(const data::DataLoader& pairs);

/// Collective. Fills the table, the same on all ranks. Throws Error on all ranks if a likelihood is not finite.
void compute_reference(ParallelModel& model, Communicator& world, const data::DataLoader& pairs,
                       const at::Tensor& table, const ReferenceOptions& options);

}  // namespace phalanx::train
