// Expert parallelism: the experts of a layer are divided among ranks that have different tokens.
//
// Of E experts over R ranks, rank r has E / R neighbours, from r E / R on. Each rank chooses experts for its own
// tokens. A layer then exchanges twice in the forward pass, and twice in the backward pass:
//
//   counts     each rank tells the others how many rows it has for each of their experts
//   dispatch   all-to-all: every row goes to the rank that has its expert
//   experts    each rank runs its own experts, on the rows of all ranks: rank 0's first
//   combine    all-to-all: the results go back, and are weighted and summed where the token is
//
// The gradient of an expert is that of the tokens of all R ranks, without another reduction. It has to be summed only
// over the ranks that have the same expert. So losses must be divided by what the global batch has, not averaged over
// ranks.
//
//   distribute_experts(mixture, mesh.communicator("ep"));        // before parameters get memory
//   at::Tensor y = nn::call(mixture, x);                         // collective
//
// - Numbers equal those of one rank up to rounding: an expert's rows are in the order of the global batch.
// - Every rank of the group runs the layer, and its backward pass, as often as the others and in the same order, with
//   any number of rows. Nothing else uses the group's communicator meanwhile.
// - On a device a layer waits for the device twice in a forward pass: for the numbers of rows that it sends and
//   receives, which are sizes of messages.
// - Traffic of a rank in a forward pass: rows * experts per token * (R - 1) / R rows of `dim` elements out, as many
//   back. The backward pass sends as much.
#pragma once

#include <memory>

#include "phalanx/comm/communicator.h"
#include "phalanx/nn/mixture_of_experts.h"

namespace phalanx {

/// Throws ConfigError unless the ranks divide the number of experts.
void distribute_experts(nn::MixtureOfExperts& mixture, const std::shared_ptr<Communicator>& group);

}  // namespace phalanx
