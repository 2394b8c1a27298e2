#include "phalanx/infer/work_stealing_queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace phalanx::infer {

WorkStealingQueue::WorkStealingQueue(Store& store, std::string name, int member, int members,
                                     std::vector<std::size_t> items)
    : store_(store), name_(std::move(name)), member_(member), members_(members), items_(std::move(items)) {}

std::pair<std::size_t, std::size_t> WorkStealingQueue::share_of(std::size_t items, int member, int members) {
  const auto m = static_cast<std::size_t>(member), all = static_cast<std::size_t>(members);
  const std::size_t each = items / all, more = items % all;  // the first `more` shares have one item more
  const std::size_t first = m * each + std::min(m, more);
  return {first, first + each + (m < more ? 1 : 0)};
}

std::vector<std::size_t> WorkStealingQueue::take(int owner, std::int64_t count) {
  const auto [first, end] = share_of(items_.size(), owner, members_);
  const std::int64_t size = static_cast<std::int64_t>(end - first);
  const std::int64_t before = store_.add(fmt::format("{}/{}", name_, owner), count) - count;
  const auto share = items_.begin() + static_cast<std::ptrdiff_t>(first);
  return {share + std::min(before, size), share + std::min(before + count, size)};
}

std::int64_t WorkStealingQueue::left(int owner) {
  const auto [first, end] = share_of(items_.size(), owner, members_);
  return static_cast<std::int64_t>(end - first) - store_.add(fmt::format("{}/{}", name_, owner), 0);
}

std::vector<std::size_t> WorkStealingQueue::claim(std::int64_t count) {
  if (left(member_) > 0) {
    if (auto mine = take(member_, count); !mine.empty()) return mine;
  }
  while (true) {
    std::pair<std::int64_t, int> most{0, 0};
    for (int owner = 0; owner < members_; ++owner) most = std::max(most, {left(owner), owner});
    if (most.first <= 0) return {};
    // Takes at most half of what is left, so that the owner still has work too.
    const std::int64_t some = std::min(count, (most.first + 1) / 2);
    if (auto others = take(most.second, some); !others.empty()) return others;
  }
}

}  // namespace phalanx::infer
