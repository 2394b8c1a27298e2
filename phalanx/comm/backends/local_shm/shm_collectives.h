// The collectives of the shm backend: chunks are exchanged through the ranks' slots, with the rounds and the reuse rule
// of control_block.h. Slots have a fixed size; a message may have any size.
//
// Exchange (all verbs but all_reduce and reduce). Let F be the operation's first round. In round F + t a rank writes
// piece t of what others need into its slot and publishes. Then it copies (or reduces) piece t - 1 out of the others'
// slots. The copy out of round F + t - 1 ends before F + t + 1 is published (rule 1 of control_block.h). The write for
// F + t begins after every rank has published F + t - 1 (rule 2).
//
// All-reduce and reduce. Up to kOneShotBytes: every rank writes its whole input and reduces everything itself, in one
// round. Above that: a chunk takes two stages, and the stages of consecutive chunks share rounds. In round F + t a rank
//   1. copies the results of chunk t - 2 out of the slots in which they were reduced,
//   2. reduces its own slice of chunk t - 1. It reads its own input and the peers' slots of round F + t - 1. It writes
//      the result to its output and into its own slot of that round: no other rank reads that slice there before this
//      rank publishes F + t,
//   3. writes its input of chunk t, except its own slice, into its slot of round F + t, and publishes F + t.
// So a chunk costs one wait. What a rank reduces itself is copied neither in nor out.
//
// Symmetric memory. If the data that peers would read (the input; for broadcast, all_reduce and reduce the output) is
// in one window on every rank, nothing goes through the slots (direct_operation.h). Each rank's first round says where
// its data is. If the data is in a window on some ranks only, or in several windows, all ranks start again with slots,
// one round later.
#pragma once

#include <memory>

#include "phalanx/comm/backends/local_shm/shm_segment.h"
#include "phalanx/comm/backends/local_shm/shm_windows.h"

namespace phalanx {

/// Any collective verb.
std::unique_ptr<Operation> make_shm_collective(ControlBlock& control_block, const ShmSegment& segment,
                                               ShmWindows& windows, const OperationDescription& description);

}  // namespace phalanx
