// Ring attention: pieces of keys and values travel from rank to rank, and each rank attends from its own positions to
// the pieces that come by.
//
// At each hop a rank starts to send the pieces that it has, and to receive the next ones, and meanwhile attends to
// those that it has. The partial outputs are merged by their log-sum-exps in fp32 (kernels/partial_attention.h). In the
// backward pass the pieces travel once more, with the gradients of each piece one hop behind it: every rank adds its
// addend in fp32, and the last one sends the sum to the owner. ring_schedule.h says who needs which piece. Sinks are
// merged once, with the result of all pieces.
//
// Between the passes a rank keeps its own queries, keys and values, its output and the log-sum-exps. During a pass
// there are two buffers for the keys and values of either way, and in the backward pass four for their gradients.
//
// Contract: that of nn::ContextAttention. Nothing else uses the group's communicator meanwhile.
#pragma once

#include <functional>
#include <memory>

#include "phalanx/comm/communicator.h"
#include "phalanx/kernels/partial_attention.h"
#include "phalanx/layout/context_cut.h"
#include "phalanx/nn/context_attention.h"

namespace phalanx {

/// REQUIRES: as make_context_attention(). `merge`: how partial outputs are merged;
/// another one is for tests of what finds faults.
using MergeParts = std::function<void(const kernels::AttentionPart& sum, const kernels::AttentionPart& part)>;
std::shared_ptr<const nn::ContextAttention> make_ring_attention(std::shared_ptr<Communicator> group,
                                                                const ContextCut& cut,
                                                                MergeParts merge = kernels::merge_into);

}  // namespace phalanx
