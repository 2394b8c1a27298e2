// Exchanges the metrics of a step between the ranks, in one small collective, and combines them.
//
//   const GlobalStepMetrics totals =
//       exchange_step_metrics({.loss = loss, .should_stop = stop_asked}, *world, data_ranks);
//   if (totals.stop) return;
//
// Collective.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "phalanx/comm/communicator.h"

namespace phalanx::train {

/// The metrics of one rank.
struct RankStepMetrics {
  double loss = 0;       // its part of the loss of the global batch
  double mean_loss = 0;  // over its own tokens; NaN: it has none
  std::int64_t label_count = 0;
  double pairs = 0;                        // of its tokens that share a document
  std::array<double, 4> preferences = {};  // PreferenceLoss::take_sums(), zeros where there are none
  bool should_stop = false;
  bool save_ended = false;  // this rank's part of an asynchronous checkpoint is written, or has failed
  double data_seconds = 0;
  double memory_gib = 0;
  double cpu_seconds = 0;  // processor time, since the same point of the previous step
  // Of this step, and of the exchange of these metrics in the previous step.
  double comm_seconds = 0;     // with an operation in flight
  double exposed_seconds = 0;  // in which the rank only waited for an operation
  double wall_seconds = 0;     // total, by this rank's clock
};

/// The same on every rank.
struct GlobalStepMetrics {
  double loss = 0;                         // of the global batch
  double max_loss = 0;                     // largest mean of a rank
  std::int64_t label_count = 0;            // of the global batch
  double pairs = 0;                        // of the global batch
  std::array<double, 4> preferences = {};  // the ranks' sums: as many ranks have each pair
  bool stop = false;                       // some rank wants to stop
  bool save_ended = true;                  // on all ranks
  double data_seconds = 0;                 // of the slowest rank
  std::vector<double> memory_gib, cpu_seconds, comm_seconds, exposed_seconds, wall_seconds;  // by rank
};

/// `data_ranks`: how many different parts of the batch the ranks have: of its sequences and their positions. As many
/// ranks have each of them, and the same loss.
GlobalStepMetrics exchange_step_metrics(const RankStepMetrics& mine, Communicator& world, std::int64_t data_ranks);

}  // namespace phalanx::train
