// Exchanges the metrics of a step between the ranks, in one small collective, and combines them.
//
//   const GlobalStepMetrics totals = exchange_step_metrics({.loss = loss, .should_stop = stop_asked}, *world);
//   if (totals.stop) return;
//
// Collective.
#pragma once

#include <vector>

#include "phalanx/comm/communicator.h"

namespace phalanx::train {

/// The metrics of one rank.
struct RankStepMetrics {
  double loss = 0;
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
  double loss = 0;                                                                           // mean over the ranks
  double max_loss = 0;                                                                       // over the ranks
  bool stop = false;                                                                         // some rank wants to stop
  bool save_ended = true;                                                                    // on all ranks
  double data_seconds = 0;                                                                   // of the slowest rank
  std::vector<double> memory_gib, cpu_seconds, comm_seconds, exposed_seconds, wall_seconds;  // by rank
};

GlobalStepMetrics exchange_step_metrics(const RankStepMetrics& mine, Communicator& world);

}  // namespace phalanx::train
