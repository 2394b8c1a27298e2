// Linear layers, and a whole feed-forward net, whose matrix products overlap with the exchange of rows around them: the
// CollectiveMatmul (nn/collective_matmul.h) of a tensor-parallel group.
//
//                          forward                              backward
//   all_gather_matmul      gathers x and multiplies it          computes dx chunk by chunk and sends each chunk while
//                          chunk by chunk                       it computes the rest, then the weight gradients
//   matmul_reduce_scatter  computes y chunk by chunk and        gathers dy and multiplies it chunk by chunk
//                          sends each while it computes the
//                          rest
//   feed_forward           both, around one hidden layer        both
//
// chunked_collectives.h explains how activations are cut into chunks.
//
// Contract
// - The same as all_gather_along(), linear() and reduce_scatter_along() one after the other: the same sums over the
//   ranks in the same order. A product computed in chunks may differ from the whole one in its last bits, because
//   matrix libraries choose their algorithm by the number of rows (1e-6 relative; no difference if they do not).
// - Weights are this rank's: rows of those that multiply gathered rows, columns of the others.
// - Weight gradients go where kernels::linear puts them: into an offered buffer, or into the queue of a surrounding
//   scope.
// - Differentiable once: a backward pass with create_graph throws Error. Under autocast, activations and weights are
//   cast first and sent in that dtype.
#pragma once

#include <cstdint>
#include <memory>

#include "phalanx/nn/collective_matmul.h"

namespace phalanx {

class Communicator;

/// `dim`: the dimension along which activations are split between the layers; not the last one.
std::shared_ptr<const nn::CollectiveMatmul> overlapped_collective_matmul(std::shared_ptr<Communicator> group,
                                                                         std::int64_t dim);

}  // namespace phalanx
