// Generates the known pipeline schedules by name. The result is a compute schedule: passes only, no transfers
// (add_transfers() of transfers.h places them). The order of each rank's passes is that of
// torch.distributed.pipelining.
//
//   name                   stages a rank  micro-batches                      placement of stages
//   GPipe                  1              any                                rank r has stage r
//   1F1B                   1              at least the ranks                 rank r has stage r
//   Interleaved1F1B        any (2)        a multiple of the rounds (below)   in loops: r, r + p, r + 2p, ...
//   LoopedBFS              any (2)        any                                in loops
//   InterleavedZeroBubble  any (2)        a multiple of the rounds           in loops
//   ZBVZeroBubble          2              any                                in a V: r and 2p - 1 - r
//   DualPipeV              2              at least the stages                in a V
//
// p is the number of ranks, m that of micro-batches; rounds = max(1, m / p rounded down). In names, case, '-', '_' and
// blanks do not matter, and common short names are known: ZB1P, ZBV, Interleaved, BFS, ...
//
// InterleavedZeroBubble with one stage a rank is ZB1P (ZB-H1) in the literature.
// docs/pipeline_schedules.md explains each.
//
// Throws ConfigError for numbers that a schedule cannot have, with the equation, the numbers and the nearest valid
// ones.
//
//   Schedule schedule = make_schedule({.name = "1F1B", .ranks = 4, .micro_batches = 8});
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "phalanx/schedule/schedule.h"

namespace phalanx::schedule {

struct ScheduleOptions {
  std::string name;
  int ranks = 1;
  int stages_per_rank = 0;  // 0: the usual number, in the table above
  int micro_batches = 1;
};

Schedule make_schedule(const ScheduleOptions& options);

/// GPipe, 1F1B, ...: in the order of the table.
const std::vector<std::string>& schedule_names();
/// The name as in the table, from any spelling or short name. Throws ConfigError for an unknown name.
std::string schedule_name(std::string_view name);
/// The number of stages a rank has by default: 1 or 2.
int usual_stages_per_rank(std::string_view name);

}  // namespace phalanx::schedule
