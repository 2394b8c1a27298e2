// Items of work shared out over members of a job while it runs: each begins with its own contiguous share, and who is
// through with it takes from the share in which most is left, so that nobody is idle. Knows no tensor.
//
// Every member is given the same list. An item goes to exactly one of them. One thread of a member calls.
//
//   WorkStealingQueue share(*store, "prompts", member, members, prompt_numbers);
//   for (auto mine = share.claim(4); !mine.empty(); mine = share.claim(4)) ...
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/store/store.h"

namespace phalanx::infer {

class WorkStealingQueue {
 public:
  /// The store must outlive it; `name` is the job's own among its keys.
  WorkStealingQueue(Store& store, std::string name, int member, int members, std::vector<std::size_t> items);

  /// At most `count` (1 or more) items more; none: there are no more.
  std::vector<std::size_t> claim(std::int64_t count);

  /// Of a member, before anybody claims: balanced, every item in one of them.
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
