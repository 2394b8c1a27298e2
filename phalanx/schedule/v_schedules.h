// The two schedules whose stages are placed in a V: rank r of p has stage r on the way down and stage 2p - 1 - r on the
// way up. So the last stage, with the loss, is on the first rank. For generators.cc, which checks the numbers.
#pragma once

#include <vector>

#include "phalanx/schedule/schedule.h"

namespace phalanx::schedule {

struct VSize {
  int rank = 0;
  int ranks = 1;
  int micro_batches = 1;
};

/// ZBV (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6). Any number of micro-batches.
std::vector<Action> zbv_actions(const VSize& size);

/// DualPipeV (DeepSeek's DualPipe, folded into a V). At least 2 * ranks micro-batches.
std::vector<Action> dual_pipe_v_actions(const VSize& size);

}  // namespace phalanx::schedule
