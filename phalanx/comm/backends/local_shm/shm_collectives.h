// The collectives of the shm backend: chunked exchange through the ranks' slots, by the rounds and the reuse rule of
// control_block.h. A message of any size goes through slots of a fixed size.
//
// Exchange (all verbs but all_reduce and reduce). In round F + t, F being the operation's first, a rank writes piece t
// of what others need into its slot and publishes; then it copies (or reduces) piece t - 1 out of the others' slots.
// The copy out of round F + t - 1 ends before F + t + 1 is published (rule 1 of control_block.h), and the write for F + t
// begins after every rank has published F + t - 1 (rule 2).
//
// All-reduce and reduce. Up to kOneShotBytes: every rank writes its whole input and reduces everything itself; one
// round. Above: a chunk takes two stages, and the stages of consecutive chunks share rounds. In round F + t a rank
//   1. copies the results of chunk t - 2 out of the slots it was reduced in,
//   2. reduces its own slice of chunk t - 1, reading its own input and the peers' slots of round F + t - 1, and writes
//      the result to its output and into its own slot of that round: nobody else reads that slice there before
//      this rank publishes F + t,
//   3. writes its input of chunk t, but for its own slice, into its slot of round F + t, and publishes F + t.
// So a chunk costs one wait, and what a rank reduces itself is copied neither in nor out.
//
// Symmetric memory. Where what peers would read (the input; of broadcast, all_reduce and reduce the output) lies in one
// window on every rank, nothing goes through the slots (direct_operation.h). Each rank's first round says where its
// data lie. Are they in a window on some ranks only, or in several windows, all start again with slots, one round
// later.
#pragma once

#include <memory>

#include "phalanx/comm/backends/local_shm/shm_segment.h"
#include "phalanx/comm/backends/local_shm/shm_windows.h"

namespace phalanx {

/// Any collective verb.
std::unique_ptr<Operation> make_shm_collective(ControlBlock& control_block, const ShmSegment& segment,
                                               ShmWindows& windows, const OperationDescription& description);

}  // namespace phalanx
