#include "phalanx/comm/gloo_watch.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr char kSeparator = '\n';

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

void post_event(Store& store, const std::string& text) {
  store.set(fmt::format("event/{}", store.add("events", 1) - 1), text);
}

}  // namespace

GlooWatch::GlooWatch(std::shared_ptr<Store> store, int rank, int size)
    : store_(std::move(store)), rank_(rank), size_(size), stop_key_(fmt::format("stop/{}", rank)) {
  store_->set_when_lost(lost_key(rank_), "died");
  thread_ = std::thread([this] { watch(); });
}

GlooWatch::~GlooWatch() {
  try {
    store_->cancel_when_lost(lost_key(rank_));
    store_->set(lost_key(rank_), "left");
    store_->set(stop_key_, "");
  } catch (const Error&) {
    // The store has gone, so the thread's wait has ended too.
  }
  thread_.join();
}

void GlooWatch::add(const std::shared_ptr<Group>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& entry) { return entry.expired(); });
  groups_.push_back(group);
}

void GlooWatch::watch() {
  pthread_setname_np(pthread_self(), "phalanx-watch");
  std::vector<int> others;
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_) others.push_back(rank);
  for (std::uint64_t next_event = 0;;) {
    std::vector<std::string> keys{stop_key_, fmt::format("event/{}", next_event)};
    for (const int rank : others) keys.push_back(lost_key(rank));
    try {
      const std::string key = store_->wait_any(keys, std::chrono::hours(24 * 300));
      if (key == stop_key_) return;
      if (key == keys[1]) {
        ++next_event;
        handle_event(store_->get(key));
        continue;
      }
      const auto lost = std::find_if(others.begin(), others.end(), [&](int rank) { return lost_key(rank) == key; });
      if (store_->get(key) == "died") {
        const std::lock_guard lock(mutex_);
        dead_[*lost] = std::chrono::steady_clock::now();
      }
      others.erase(lost);
    } catch (const Error&) {
      return;  // the store has gone: operations still under way learn of their peers from gloo's sockets alone
    }
  }
}

void GlooWatch::handle_event(const std::string& event) {
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

void GlooWatch::announce_abort(const Group& group, const std::string& reason) noexcept {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (!announced_.emplace(group.id, true).second) return;
    }
    post_event(*store_, fmt::format("abort{}{}{}{}", kSeparator, group.id, kSeparator, reason));
  } catch (...) {  // the peers then learn it from gloo's sockets
  }
}

std::string GlooWatch::trouble(const Group& group, std::chrono::milliseconds age) const {
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

std::string GlooWatch::announced(const Group& group) const {
  const std::lock_guard lock(mutex_);
  const auto found = aborted_.find(group.id);
  return found == aborted_.end() ? "" : found->second;
}

std::vector<int> GlooWatch::lost(const Group& group) const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (std::size_t i = 0; i < group.members.size(); ++i)
    if (dead_.contains(group.members[i])) ranks.push_back(static_cast<int>(i));
  return ranks;
}

std::vector<int> GlooWatch::behind(const Group& group, std::uint64_t sequence) {
  constexpr std::chrono::milliseconds kPatience{1'000};
  std::vector<int> result;
  try {
    const std::string roll = fmt::format("roll/{}", store_->add("rolls", 1));
    post_event(*store_, fmt::format("roll{}{}{}{}", kSeparator, group.id, kSeparator, roll));
    std::vector<std::string> keys;
    for (const int member : group.members)
      if (member != rank_) keys.push_back(fmt::format("{}/{}", roll, member));
    try {
      store_->wait(keys, kPatience);
    } catch (const Error&) {
      // Whoever is silent is behind.
    }
    for (const int member : group.members) {
      if (member == rank_) continue;
      const auto answer = store_->try_get(fmt::format("{}/{}", roll, member));
      if (!answer || std::strtoull(answer->c_str(), nullptr, 10) <= sequence) result.push_back(member);
    }
  } catch (const Error&) {
    // No store, no answer: better no names than wrong ones.
  }
  return result;
}

}  // namespace phalanx
