// Schedule: a pipeline schedule as data. For each rank the list of its actions, in order. It does not use torch.
//
// It is generated (generators.h), or read from a file (schedule_text.h), then validated, simulated, drawn, and executed
// by one generic runtime (parallel/pipeline). Text forms are those of torch.distributed.pipelining: `2F0` is stage 2's
// forward pass of micro-batch 0; `0I2` and `0W2` are the backward_input and backward_weight of a backward pass;
// `1SEND_F3`, `(0F1;3B0)OVERLAP_F_B`.
//
// Stages are numbered along the model, from 0; each is on one rank. Transfers name the stage that acts: `1SEND_F3` is
// stage 1 sending its output for micro-batch 3 to stage 2, which has `2RECV_F3`; `1SEND_B3` sends the gradient of its
// input to stage 0, which has `0RECV_B3`. Between two stages on one rank nothing is sent.
//
// A schedule without transfers is a compute schedule; add_transfers() (transfers.h) places them.
#pragma once

#include <string>
#include <vector>

namespace phalanx::schedule {

enum class ActionKind {
  forward,           // F
  backward,          // B: backward_input and backward_weight at once
  backward_input,    // I: the gradient of the stage's input
  backward_weight,   // W: the gradients of its parameters; after its I
  send_forward,      // SEND_F: the output, to the next stage
  recv_forward,      // RECV_F: the input, from the previous stage
  send_backward,     // SEND_B: the gradient of the input, to the previous stage
  recv_backward,     // RECV_B: the gradient of the output, from the next stage
  unshard,           // UNSHARD: all-gathers the stage's sharded parameters; no micro-batch
  reshard,           // RESHARD: frees the unsharded parameters; no micro-batch
  reduce_gradients,  // REDUCE_GRAD: averages the stage's gradients over the data-parallel group; no micro-batch
  overlap,           // OVERLAP_F_B: its parts at the same time; they may also be run one after the other
};

struct Action {
  int stage = 0;
  ActionKind kind = ActionKind::forward;
  int micro_batch = -1;             // -1 if the kind has none
  std::vector<Action> sub_actions;  // of an overlap

  bool operator==(const Action&) const = default;
};

struct Schedule {
  std::string name;  // "1F1B"
  int micro_batches = 0;
  std::vector<int> rank_of_stage;            // its size is the number of stages
  std::vector<std::vector<Action>> actions;  // by rank

  int ranks() const noexcept { return static_cast<int>(actions.size()); }
  int stages() const noexcept { return static_cast<int>(rank_of_stage.size()); }
  std::vector<int> stages_of(int rank) const;  // ascending

  bool operator==(const Schedule&) const = default;
};

}  // namespace phalanx::schedule
