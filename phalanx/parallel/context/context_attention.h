// Causal attention whose sequences are cut over ranks (context parallelism).
//
//   const ContextCut cut{.ranks = group->size(), .rank = group->rank()};        // layout/context_cut.h
//   const auto attention = make_context_attention(ContextExchange::keys, group, cut);
//   y = attention->attend(q, k, v, {.window = window, .documents = documents});  // this rank's positions
//
// What is exchanged:
// - keys: every rank gathers the keys and values of all positions, and attends from its own positions with all heads.
//   Their gradients are reduce-scattered in fp32. Keys and values travel with their own heads, not with those of the
//   queries. They stay in memory until the backward pass: 2 * positions * kv_heads * head_dim numbers a layer. It alone
//   takes a cut by work (ContextCut::by_work): then each packed row has positions of its own on each rank.
// - heads (Ulysses): an all-to-all turns all heads of some positions into all positions of some heads, and another one
//   turns the result back. Needs a number of heads that the ranks divide. If there are fewer key and value heads than
//   ranks, several ranks have the same one, and its gradients are summed. It has every kernel of whole sequences.
// - ring: keys and values go from rank to rank while each rank attends to those that it has (ring_attention.h). None
//   but its own stay in memory, and windows and documents spare transfers.
//
// Contract: that of nn::ContextAttention. Nothing else uses the group's communicator meanwhile.
#pragma once

#include <cstdint>
#include <memory>

#include "phalanx/comm/communicator.h"
#include "phalanx/layout/context_cut.h"
#include "phalanx/nn/context_attention.h"

namespace phalanx {

enum class ContextExchange : std::uint8_t { keys, heads, ring };

/// REQUIRES: `cut` is of the group's ranks, with this rank's number in it.
std::shared_ptr<const nn::ContextAttention> make_context_attention(ContextExchange exchange,
                                                                   std::shared_ptr<Communicator> group,
                                                                   const ContextCut& cut);

}  // namespace phalanx
