// The known pipeline schedules, made by name. What comes out is a compute schedule: passes only, no transfers
// (add_transfers() of transfers.h places them). The order of each rank's passes is that of
// torch.distributed.pipelining.
//
//   name                   stages a rank  micro-batches                      stages are laid out
//   GPipe                  1              any                                rank r has stage r
//   1F1B                   1              at least the ranks                 rank r has stage r
//   Interleaved1F1B        any (2)        a multiple of the rounds (below)   in loops: r, r + p, r + 2p, ...
//   LoopedBFS              any (2)        any                                in loops
//   InterleavedZeroBubble  any (2)        a multiple of the rounds           in loops
//   ZBVZeroBubble          2              any                                in a V: r and 2p - 1 - r
//   DualPipeV              2              at least the stages                in a V
//
// p are the ranks, m the micro-batches; rounds = max(1, m / p rounded down). Case, '-', '_' and blanks in names do not
// count, and the short names that people use are known: ZB1P, ZBV, Interleaved, BFS, ...
//
// InterleavedZeroBubble with one stage a rank is the literature's ZB1P (ZB-H1). docs/pipeline.md explains each.
//
// Numbers that a schedule cannot have are a ConfigError with the equation, the numbers and the nearest valid ones.
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
  int stages_per_rank = 0;  // 0: as many as is usual, the number in the table above
  int micro_batches = 1;
};

Schedule make_schedule(const ScheduleOptions& options);

/// GPipe, 1F1B, ...: in the order of the table.
const std::vector<std::string>& schedule_names();
/// The name as in the table, from any spelling or short name; an unknown one is a ConfigError.
std::string schedule_name(std::string_view name);
/// How many stages a rank has where nothing is said: 1 or 2.
int usual_stages_per_rank(std::string_view name);

}  // namespace phalanx::schedule
