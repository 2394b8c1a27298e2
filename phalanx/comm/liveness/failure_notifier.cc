#include "phalanx/comm/liveness/failure_notifier.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"

namespace phalanx {
namespace {

constexpr char kSeparator = '\n';
// The thread repeats its request after this time, so it never waits for ever on a connection that has gone silent.
constexpr std::chrono::milliseconds kWatchSlice{2'000};
// The store has this long to record that this rank leaves. A slow store reads what it was sent a little later.
constexpr std::chrono::milliseconds kGoodbye{300};

std::vector<std::string> split_event(const std::string& event, std::size_t fields) {
  std::vector<std::string> result;
  std::size_t begin = 0;
  while (result.size() + 1 < fields) {
    const std::size_t end = event.find(kSeparator, begin);
    if (end == std::string::npos) break;
    result.push_back(event.substr(begin, end - begin));
    begin = end + 1;
  }
  result.push_back(event.substr(begin));
  result.resize(fields);
  return result;
}

std::string lost_key(int rank) { return fmt::format("lost/{}", rank); }
std::string hello_key(int rank) { return fmt::format("hello/{}", rank); }
std::string event_key(std::uint64_t number) { return fmt::format("event/{}", number); }

}  // namespace

FailureNotifier::FailureNotifier(const std::shared_ptr<Store>& store, int rank, int size)
    : store_(store->clone()), rank_(rank), size_(size) {
  store_->set(hello_key(rank_), "");
  store_->set_when_lost(lost_key(rank_), "died");
  thread_ = start_thread("the watch over the ranks", [this] { run(); });
}

FailureNotifier::~FailureNotifier() {
  stopping_.store(true);
  try {
    store_->interrupt(kGoodbye);
    if (!is_store_lost()) {
      // Sent before the connection closes, so its end means "left" even if the store does not answer in time.
      store_->set_when_lost(lost_key(rank_), "left");
      store_->set(lost_key(rank_), "left");
    }
  } catch (...) {
    // The store is silent, or has gone.
  }
  store_->interrupt();
  thread_.join();
}

// Searches for the next free number. A counter would leave a gap if the rank that took a number were killed before it
// wrote.
void FailureNotifier::post_event(const std::string& text) {
  for (std::uint64_t number = next_event_.load();; ++number)
    if (store_->compare_and_set(event_key(number), std::nullopt, text) == text) return;
}

void FailureNotifier::add(const std::shared_ptr<Group>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& entry) { return entry.expired(); });
  groups_.push_back(group);
}

void FailureNotifier::run() {
  pthread_setname_np(pthread_self(), "phalanx-watch");
  std::vector<int> others;
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_) others.push_back(rank);
  while (!stopping_.load()) {
    std::vector<std::string> keys{event_key(next_event_.load())};
    for (const int rank : others) keys.push_back(lost_key(rank));
    const auto asked = std::chrono::steady_clock::now();
    try {
      const std::string key = store_->wait_any(keys, kWatchSlice);
      if (key == keys.front()) {
        const std::string event = store_->get(key);
        next_event_.fetch_add(1);
        handle_event(event);
        continue;
      }
      const auto lost = std::find_if(others.begin(), others.end(), [&](int rank) { return lost_key(rank) == key; });
      const bool died = store_->get(key) == "died";
      {
        const std::lock_guard lock(mutex_);
        if (died)
          dead_[*lost] = std::chrono::steady_clock::now();
        else
          left_.push_back(*lost);
      }
      others.erase(lost);
    } catch (const Error&) {
      if (stopping_.load()) return;
      if (std::chrono::steady_clock::now() - asked >= kWatchSlice) continue;  // nothing has happened
      is_store_lost_.store(true, std::memory_order_release);
      return;
    }
  }
}

void FailureNotifier::handle_event(const std::string& event) {
  if (event.starts_with("abort")) {
    const auto fields = split_event(event, 3);  // abort, group, reason
    const std::lock_guard lock(mutex_);
    aborted_.emplace(fields[1], fields[2]);
    return;
  }
  const auto fields = split_event(event, 3);  // roll, group, key for the answers
  std::uint64_t sequence = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& entry : groups_)
      if (const auto group = entry.lock(); group && group->id == fields[1])
        sequence = group->sequence.load(std::memory_order_relaxed);
  }
  store_->set(fmt::format("{}/{}", fields[2], rank_), std::to_string(sequence));
}

void FailureNotifier::announce_abort(const Group& group, const std::string& reason) noexcept {
  if (is_store_lost()) return;  // no rank can be told
  try {
    {
      const std::lock_guard lock(mutex_);
      if (!announced_.emplace(group.id, true).second) return;
    }
    post_event(fmt::format("abort{}{}{}{}", kSeparator, group.id, kSeparator, reason));
  } catch (...) {  // the peers then learn it from their connections to this rank
  }
}

std::string FailureNotifier::failure_reason(const Group& group, std::chrono::milliseconds age) const {
  const std::lock_guard lock(mutex_);
  const auto limit = std::chrono::steady_clock::now() - age;
  std::string text;
  for (std::size_t i = 0; i < group.members.size(); ++i) {
    const auto found = dead_.find(group.members[i]);
    if (found == dead_.end() || found->second > limit) continue;
    text += fmt::format("{}rank {} has died", text.empty() ? "" : ", ", i);
  }
  if (!text.empty()) return text;
  const auto aborted = aborted_.find(group.id);
  return aborted == aborted_.end() ? "" : aborted->second;
}

std::string FailureNotifier::announced_abort(const Group& group) const {
  const std::lock_guard lock(mutex_);
  const auto found = aborted_.find(group.id);
  return found == aborted_.end() ? "" : found->second;
}

std::vector<int> FailureNotifier::lost(const Group& group) const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (std::size_t i = 0; i < group.members.size(); ++i)
    if (dead_.contains(group.members[i])) ranks.push_back(static_cast<int>(i));
  return ranks;
}

std::vector<int> FailureNotifier::left(const Group& group) const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (std::size_t i = 0; i < group.members.size(); ++i)
    if (std::find(left_.begin(), left_.end(), group.members[i]) != left_.end()) ranks.push_back(static_cast<int>(i));
  return ranks;
}

std::vector<int> FailureNotifier::behind(const Group& group, std::uint64_t sequence) {
  constexpr std::chrono::milliseconds kPatience{1'000};
  std::vector<int> result;
  try {
    const std::string roll = fmt::format("roll/{}", store_->add("rolls", 1));
    post_event(fmt::format("roll{}{}{}{}", kSeparator, group.id, kSeparator, roll));
    std::vector<std::string> keys;
    for (const int member : group.members)
      if (member != rank_) keys.push_back(fmt::format("{}/{}", roll, member));
    try {
      store_->wait(keys, kPatience);
    } catch (const Error&) {
      // A silent rank is behind.
    }
    for (const int member : group.members) {
      if (member == rank_) continue;
      const auto answer = store_->try_get(fmt::format("{}/{}", roll, member));
      if (!answer || std::strtoull(answer->c_str(), nullptr, 10) <= sequence) result.push_back(member);
    }
  } catch (const Error&) {
    // Without the store there are no answers: no names are better than wrong ones.
  }
  return result;
}

}  // namespace phalanx
