#include "phalanx/comm/liveness/group_peers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr std::chrono::milliseconds kRendezvousPollInterval{100};

}  // namespace

GroupPeers::GroupPeers(Setup setup) : setup_(std::move(setup)) {
  group_->id = setup_.id;
  group_->members = setup_.members;
}

GroupPeers::Setup GroupPeers::split(std::uint64_t serial, const std::vector<int>& members, int rank) const {
  Setup setup = setup_;
  setup.id = fmt::format("{}.{}.{}", setup_.id, serial, members.front());
  setup.rank = rank;
  setup.members.clear();
  for (const int member : members) setup.members.push_back(world_rank(member));
  return setup;
}

std::vector<std::string> GroupPeers::rendezvous(const std::string& name, const std::string& value) {
  using Clock = std::chrono::steady_clock;
  PrefixStore store(setup_.store, setup_.id);
  store.set(fmt::format("{}/{}", name, rank()), value);
  std::vector<std::string> keys;
  for (int r = 0; r < size(); ++r) keys.push_back(fmt::format("{}/{}", name, r));
  const auto deadline = Clock::now() + setup_.connect_timeout;
  for (;;) {
    const auto begin = Clock::now();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - begin);
    const auto slice = std::clamp(left, std::chrono::milliseconds(0), kRendezvousPollInterval);
    try {
      return store.get_all(keys, slice);
    } catch (const CommError&) {
      if (Clock::now() - begin < slice) throw;  // not a timeout
    }
    throw_if_peer_failed();
    if (left > slice) continue;
    std::vector<int> missing;
    for (int r = 0; r < size(); ++r)
      if (!store.try_get(keys[static_cast<std::size_t>(r)])) missing.push_back(r);
    if (missing.empty()) continue;
    throw CommError(fmt::format("{}: {}: of the {} ranks of group '{}' these have not come within {} s: {}",
                                setup_.backend, store.describe(), size(), setup_.id,
                                static_cast<double>(setup_.connect_timeout.count()) / 1000, fmt::join(missing, ", ")));
  }
}

void GroupPeers::begin(const std::vector<std::string>& identities) {
  if (!setup_.heartbeat_monitor)
    setup_.heartbeat_monitor =
        std::make_shared<HeartbeatMonitor>(setup_.store, setup_.rank, identities, setup_.heartbeat_options);
}

void GroupPeers::throw_if_peer_failed() {
  if (setup_.heartbeat_monitor) setup_.heartbeat_monitor->wait_in(setup_.id, "making");
  if (const std::string why = failure_reason(); !why.empty())
    throw CommError(fmt::format("group '{}' of {} could not be made: {}", setup_.id, setup_.backend, why));
}

std::string GroupPeers::announced_failure(std::chrono::milliseconds age) const {
  std::string text = setup_.failure_notifier->failure_reason(*group_, age);
  if (!text.empty() || !setup_.failure_notifier->is_store_lost() || !setup_.heartbeat_monitor) return text;
  // If the store died with one of the ranks, nothing reports the dead ranks.
  const std::vector<int> left = setup_.failure_notifier->left(*group_);
  for (int r = 0; r < size(); ++r) {
    if (r == rank() || std::find(left.begin(), left.end(), r) != left.end()) continue;
    if (setup_.heartbeat_monitor->is_dead(world_rank(r)) || world_rank(r) == setup_.heartbeat_options.store_rank)
      text += fmt::format("{}rank {} has died", text.empty() ? "" : ", ", r);
  }
  return text.empty() ? text : text + ", and with it the store";
}

std::string GroupPeers::failure_reason(std::chrono::milliseconds age) const {
  std::string text = announced_failure(age);
  for (int r = 0; r < size() && text.empty() && setup_.heartbeat_monitor; ++r)
    if (const std::string why = setup_.heartbeat_monitor->failure_reason(world_rank(r)); !why.empty())
      text = fmt::format("rank {} {}", r, why);
  return text;
}

bool GroupPeers::is_unresponsive(int rank) const {
  const std::vector<int> dead = lost();
  if (std::find(dead.begin(), dead.end(), rank) != dead.end()) return true;
  if (!setup_.heartbeat_monitor || rank == this->rank()) return false;
  return setup_.heartbeat_monitor->is_dead(world_rank(rank)) ||
         !setup_.heartbeat_monitor->failure_reason(world_rank(rank)).empty();
}

std::string GroupPeers::who_left() const {
  const std::vector<int> left = setup_.failure_notifier->left(*group_);
  if (left.empty()) return {};
  return fmt::format("rank{} {} ha{} ended, or closed the communicator", left.size() == 1 ? "" : "s",
                     fmt::join(left, ", "), left.size() == 1 ? "s" : "ve");
}

std::string GroupPeers::disconnect_reason() const {
  if (setup_.failure_notifier->is_store_lost())
    return fmt::format(
        "this rank has lost its connection to the {}, so the others take it for dead: the process that hosts the store "
        "has ended, or the network between is down",
        setup_.store->describe());
  if (!setup_.heartbeat_monitor || !setup_.heartbeat_monitor->is_store_silent()) return {};
  return fmt::format(
      "the {} has not answered this rank for {:.1f} s, so the others take it for dead: the process that hosts "
      "the store is stopped, or the network between is down",
      setup_.store->describe(), std::chrono::duration<double>(setup_.heartbeat_monitor->store_silence()).count());
}

void GroupPeers::check_wait(const std::string& for_what, std::chrono::milliseconds age) {
  if (size() > 1) setup_.heartbeat_monitor->wait_in(setup_.id, for_what);
  if (const std::string why = failure_reason(age); !why.empty()) throw CommError(why);
}

void GroupPeers::end_wait() {
  if (setup_.heartbeat_monitor) setup_.heartbeat_monitor->leave(setup_.id);
}

std::vector<std::string> GroupPeers::states() const {
  const std::vector<std::string> of_world = setup_.heartbeat_monitor->states(setup_.id);
  std::vector<std::string> result;
  for (const int member : setup_.members) result.push_back(of_world[static_cast<std::size_t>(member)]);
  return result;
}

std::vector<int> GroupPeers::behind(std::uint64_t collective) const {
  std::vector<int> result;
  if (size() > 1 && setup_.heartbeat_monitor->is_store_silent()) return result;
  for (const int member : setup_.failure_notifier->behind(*group_, collective))
    for (int r = 0; r < size(); ++r)
      if (world_rank(r) == member) result.push_back(r);
  return result;
}

void GroupPeers::announce_abort(const std::string& reason) noexcept {
  // Otherwise the peers learn it from their connections to this rank.
  if (setup_.heartbeat_monitor && setup_.heartbeat_monitor->is_store_silent()) return;
  try {
    setup_.failure_notifier->announce_abort(*group_, fmt::format("rank {} gave up: {}", rank(), reason));
  } catch (...) {  // no memory for the text
  }
}

}  // namespace phalanx
