// What the ranks tell each other about a step, in one small collective, and what all of them make of it.
//
//   const GlobalStepMetrics totals = exchange_step_metrics({.loss = loss, .should_stop = asked}, *world);      // collective
//   if (totals.stop) ...
#pragma once

#include <vector>

#include "phalanx/comm/communicator.h"

namespace phalanx::train {

/// Of one rank.
struct RankStepMetrics {
  double loss = 0;
  bool should_stop = false;
  bool save_ended = false;  // its part of an asynchronous checkpoint is written, or has failed
  double data_seconds = 0;
  double memory_gib = 0;
  double cpu_seconds = 0;  // processor time, from the same point of the step before
  // Of this step, and of the exchange of these figures in the step before.
  double comm_seconds = 0;     // with an operation under way
  double exposed_seconds = 0;  // in which the rank did nothing but wait for one
  double wall_seconds = 0;     // all of it, by this rank's clock
};

/// The same on every rank.
struct GlobalStepMetrics {
  double loss = 0;                                                                           // mean over ranks
  double max_loss = 0;                                                                       // over ranks
  bool stop = false;                                                                         // some rank wants to
  bool save_ended = true;                                                                    // on all ranks
  double data_seconds = 0;                                                                   // of the slowest rank
  std::vector<double> memory_gib, cpu_seconds, comm_seconds, exposed_seconds, wall_seconds;  // by rank
};

GlobalStepMetrics exchange_step_metrics(const RankStepMetrics& mine, Communicator& world);

}  // namespace phalanx::train
