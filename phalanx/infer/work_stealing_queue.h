// WorkStealingQueue distributes items of work over the members of a job while it runs. Each member begins with its own
// contiguous share. A member that has finished its share takes items from the share with the most items left, so that
// no member is idle. It does not use torch.
//
// REQUIRES: every member passes the same list, and only one thread of a member calls.
// ENSURES: every item goes to exactly one member.
//
//   WorkStealingQueue queue(*store, "prompts", member, members, prompt_numbers);
//   for (auto mine = queue.claim(4); !mine.empty(); mine = queue.claim(4)) process(mine);
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/store/store.h"

namespace phalanx::infer {

class WorkStealingQueue {
 public:
  /// REQUIRES: the store outlives this object; among its keys `name` is used only by this job.
  WorkStealingQueue(Store& store, std::string name, int member, int members, std::vector<std::size_t> items);

  /// Returns at most `count` (1 or more) more items; empty: there are no more.
  std::vector<std::size_t> claim(std::int64_t count);

  /// The initial share of a member, as indices [first, second). Shares are balanced; every item is in one of them.
  static std::pair<std::size_t, std::size_t> share_of(std::size_t items, int member, int members);

 private:
  std::vector<std::size_t> take(int owner, std::int64_t count);
  std::int64_t left(int owner);

  Store& store_;
  std::string name_;
  int member_, members_;
  std::vector<std::size_t> items_;
};

}  // namespace phalanx::infer
