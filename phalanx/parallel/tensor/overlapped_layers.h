// Linear layers, and a whole feed-forward net, whose products overlap the exchange of rows around them: the CollectiveMatmul
// (nn/collective_matmul.h) of a tensor-parallel group.
//
//                     forward                              backward
//   all_gather_matmul gather x, piece by piece multiplied  dx piece by piece, sent while the rest is computed, then
//                                                          while the weight gradients are
//   matmul_reduce_scatter y piece by piece, sent while the     gather dy, piece by piece multiplied
//                     rest is computed
//   feed_forward      both, around one hidden layer        both
//
// How activations are cut into pieces is said in chunked_collectives.h.
//
// Contract
// - As all_gather_along(), linear() and reduce_scatter_along() one after the other: the same sums over the ranks in the
//   same order. A product in pieces may differ from the whole one in its last bits, as matrix libraries choose their
//   way by the number of rows (1e-6 relative; none where they do not).
// - Weights are this rank's: rows of those that are multiplied with gathered rows, columns of the others.
// - Weight gradients as kernels::linear: into an offered buffer, or left in the queue of a scope around.
// - Once differentiable: a backward pass with create_graph is an Error. Under autocast, activations and weights are
//   cast first and travel so.
#pragma once

#include <cstdint>
#include <memory>

#include "phalanx/nn/collective_matmul.h"

namespace phalanx {

class Communicator;

/// `dim`: along which activations are split between the layers; not the last one.
std::shared_ptr<const nn::CollectiveMatmul> overlapped_collective_matmul(std::shared_ptr<Communicator> group,
                                                                         std::int64_t dim);

}  // namespace phalanx
