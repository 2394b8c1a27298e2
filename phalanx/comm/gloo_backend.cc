#include "phalanx/comm/gloo_backend.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <condition_variable>
#include <future>
#include <numeric>
#include <sstream>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/comm/futex.h"
#include "phalanx/comm/gloo.h"
#include "phalanx/comm/gloo_group.h"

namespace phalanx {
namespace {

// Operations end by the communicator's clock, which knows more; gloo's own only has to be longer.
constexpr std::chrono::milliseconds kGlooTimeout = std::chrono::hours(24 * 7);
// All ranks are there when they begin to connect.
constexpr std::chrono::milliseconds kConnectTimeout{30'000};
constexpr std::chrono::milliseconds kLookWhileMaking{100};
constexpr std::chrono::milliseconds kBlameWhileMaking{700};
constexpr std::chrono::milliseconds kLeaveGloo{200};
constexpr int kTagMessages = 1 << 29;        // message numbers before they wrap: odd gloo tags
constexpr int kAbortTag = kTagMessages * 2;  // no message has it

}  // namespace

GlooBackend::GlooBackend(Setup setup)
    : setup_(std::move(setup)), messages_(setup_.members.size(), 0), counts_(setup_.members.size()) {
  watched_->id = setup_.id;
  watched_->members = setup_.members;
  try {
    if (size() > 1) join(std::make_shared<PrefixStore>(setup_.store, setup_.id));
  } catch (const CommError& error) {
    if (!setup_.pulse || !setup_.pulse->is_store_silent())
      setup_.watch->announce_abort(*watched_, fmt::format("rank {} gave up: {}", rank(), error.what()));
    throw;
  }
  setup_.watch->add(watched_);
}

void GlooBackend::join(const std::shared_ptr<Store>& store) {
  const std::vector<std::string> identities = meet(*store, "rank", setup_.identity);
  if (!setup_.pulse) setup_.pulse = std::make_shared<PeerPulse>(setup_.store, rank(), identities, setup_.pulse_options);
  gloo_ = connect(store);
  gloo_->setTimeout(kGlooTimeout);
  // Nobody goes on, and perhaps away again, while another is still connecting.
  meet(*store, "connected", "");
  setup_.pulse->leave(watched_->id);
}

// gloo cannot be interrupted while it connects, and would wait long for a rank that dies meanwhile. So a thread
// connects, which is left to itself, and to gloo's time-out, when there is no use in it any more.
c10::intrusive_ptr<c10d::Backend> GlooBackend::connect(const std::shared_ptr<Store>& store) const {
  struct Connecting {
    std::mutex mutex;
    std::condition_variable ended;
    bool has_ended = false;
    c10::intrusive_ptr<c10d::Backend> group;
    std::string error;
  };
  auto connecting = std::make_shared<Connecting>();
  std::thread([=, rank = rank(), size = size(), host = setup_.host,
               timeout = std::min(setup_.connect_timeout, kConnectTimeout)] {
    c10::intrusive_ptr<c10d::Backend> group;
    std::string error;
    try {
      group = make_gloo_group(store, rank, size, host, timeout);
    } catch (const std::exception&) {
      error = gloo_error_text(std::current_exception());
    }
    const std::lock_guard lock(connecting->mutex);
    connecting->group = std::move(group);
    connecting->error = std::move(error);
    connecting->has_ended = true;
    connecting->ended.notify_all();
  }).detach();
  std::unique_lock lock(connecting->mutex);
  while (!connecting->ended.wait_for(lock, kLookWhileMaking, [&] { return connecting->has_ended; }))
    throw_trouble_in_making();
  if (connecting->group) return std::move(connecting->group);
  // gloo notices a broken connection before the store tells whose it was.
  const auto patience = std::chrono::steady_clock::now() + kBlameWhileMaking;
  while (std::chrono::steady_clock::now() < patience) {
    throw_trouble_in_making();
    connecting->ended.wait_for(lock, kLookWhileMaking, [] { return false; });
  }
  throw CommError(fmt::format("gloo cannot connect rank {} at {} with the {} ranks of group '{}': {}", rank(),
                              setup_.host, size(), setup_.id, connecting->error));
}

void GlooBackend::throw_trouble_in_making() const {
  if (setup_.pulse) setup_.pulse->wait_in(watched_->id, "making");
  if (const std::string why = setup_.pulse ? trouble() : announced_trouble(); !why.empty())
    throw CommError(fmt::format("group '{}' of gloo could not be made: {}", setup_.id, why));
}

std::vector<std::string> GlooBackend::meet(Store& store, const std::string& name, const std::string& value) const {
  using Clock = std::chrono::steady_clock;
  store.set(fmt::format("{}/{}", name, rank()), value);
  std::vector<std::string> keys;
  for (int r = 0; r < size(); ++r) keys.push_back(fmt::format("{}/{}", name, r));
  const auto deadline = Clock::now() + setup_.connect_timeout;
  for (;;) {
    const auto begin = Clock::now();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - begin);
    const auto slice = std::clamp(left, std::chrono::milliseconds(0), kLookWhileMaking);
    try {
      return store.get_all(keys, slice);
    } catch (const CommError&) {
      if (Clock::now() - begin < slice) throw;  // not for the time
    }
    throw_trouble_in_making();
    if (left > slice) continue;
    std::vector<int> missing;
    for (int r = 0; r < size(); ++r)
      if (!store.try_get(keys[static_cast<std::size_t>(r)])) missing.push_back(r);
    if (missing.empty()) continue;
    throw CommError(fmt::format("gloo: {}: of the {} ranks of group '{}' these have not come within {} s: {}",
                                store.describe(), size(), setup_.id,
                                static_cast<double>(setup_.connect_timeout.count()) / 1000, fmt::join(missing, ", ")));
  }
}

// What gloo has begun to write to a rank that is stopped cannot be taken back, and its destructor waits for that. After
// a failure it gets a moment, and is then left to itself.
GlooBackend::~GlooBackend() {
  if (!gloo_ || !aborted_.load()) return;
  auto ended = std::make_shared<std::promise<void>>();
  std::future<void> end = ended->get_future();
  std::thread([ended, group = std::move(gloo_)]() mutable {
    group.reset();
    ended->set_value();
  }).detach();
  end.wait_for(kLeaveGloo);
}

std::unique_ptr<Operation> GlooBackend::start(const OperationDescription& description) {
  throw_if_aborted();
  return description.transfers.empty() ? make_gloo_collective(*this, description)
                                       : make_gloo_transfers(*this, description);
}

std::shared_ptr<Backend> GlooBackend::split(const SplitRequest& request) {
  throw_if_aborted();
  if (request.members.empty()) return nullptr;
  Setup setup = setup_;
  setup.id = fmt::format("{}.{}.{}", setup_.id, request.serial, request.members.front());
  setup.rank = request.rank;
  setup.members.clear();
  for (const int member : request.members) setup.members.push_back(setup_.members[static_cast<std::size_t>(member)]);
  return std::make_shared<GlooBackend>(std::move(setup));
}

void GlooBackend::abort(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(abort_mutex_);
    if (aborted_.load()) return;
    abort_reason_ = reason;
    aborted_.store(true);
  }
  if (gloo_) {
    // A store that does not answer would hold up the error; the peers then learn from the broken connections.
    if (!setup_.pulse->is_store_silent())
      setup_.watch->announce_abort(*watched_, fmt::format("rank {} gave up: {}", rank(), reason));
    // A receive that times out breaks all of gloo's connections of this group: what is under way here ends now, so that
    // no thread waits in it, and the peers notice. One on a connection that is broken already fails and breaks no
    // other, and the one to a stopped rank does not break by itself: so each is tried.
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      try {
        std::vector<at::Tensor> byte{at::empty({1}, at::kByte)};
        gloo_->recv(byte, peer, kAbortTag)->wait(std::chrono::milliseconds(1));
      } catch (...) {
      }
    }
  }
  ring(bell_->word, bell_->sleepers, false);
}

void GlooBackend::check_ranks() {
  throw_if_aborted();
  if (const std::string why = trouble(); !why.empty()) throw CommError(why);
}

void GlooBackend::throw_if_aborted() const {
  if (!aborted_.load()) return;
  const std::lock_guard lock(abort_mutex_);
  throw CommError(fmt::format("the group was aborted: {}", abort_reason_));
}

std::string GlooBackend::announced_trouble(std::chrono::milliseconds age) const {
  std::string text = setup_.watch->trouble(*watched_, age);
  if (!text.empty() || !setup_.watch->is_store_lost() || !setup_.pulse) return text;
  // Nobody tells of the dead when the store has died with one of them.
  const std::vector<int> left = setup_.watch->left(*watched_);
  for (int r = 0; r < size(); ++r) {
    const int world_rank = setup_.members[static_cast<std::size_t>(r)];
    if (r == rank() || std::find(left.begin(), left.end(), r) != left.end()) continue;
    if (setup_.pulse->is_dead(world_rank) || world_rank == setup_.pulse_options.store_rank)
      text += fmt::format("{}rank {} has died", text.empty() ? "" : ", ", r);
  }
  return text.empty() ? text : text + ", and with it the store";
}

std::string GlooBackend::trouble(std::chrono::milliseconds age) const {
  std::string text = announced_trouble(age);
  for (int r = 0; r < size() && text.empty() && setup_.pulse; ++r)
    if (const std::string why = setup_.pulse->trouble(setup_.members[static_cast<std::size_t>(r)]); !why.empty())
      text = fmt::format("rank {} {}", r, why);
  return text;
}

std::string GlooBackend::who_left() const {
  const std::vector<int> left = setup_.watch->left(*watched_);
  if (left.empty()) return {};
  return fmt::format("rank{} {} ha{} ended, or closed the communicator", left.size() == 1 ? "" : "s",
                     fmt::join(left, ", "), left.size() == 1 ? "s" : "ve");
}

// "collectives begun; peer:sends,done,receives,done; ..."
std::string GlooBackend::waits_text() const {
  std::string text = std::to_string(watched_->sequence.load());
  for (std::size_t peer = 0; peer < counts_.size(); ++peer) {
    const MessageCounts& with = counts_[peer];
    if (with.sends != with.sends_done || with.receives != with.receives_done)
      text += fmt::format("; {}:{},{},{},{}", peer, with.sends, with.sends_done, with.receives, with.receives_done);
  }
  return text;
}

void GlooBackend::look_after_wait(std::chrono::milliseconds age) {
  if (size() > 1) setup_.pulse->wait_in(watched_->id, waits_text());
  if (const std::string why = trouble(age); !why.empty()) throw CommError(why);
}

std::string GlooBackend::why_stuck() const {
  if (size() == 1) return {};
  const std::vector<std::string> states = setup_.pulse->states(watched_->id);
  for (int r = 0; r < size(); ++r) {
    std::istringstream state(states[static_cast<std::size_t>(setup_.members[static_cast<std::size_t>(r)])]);
    std::uint64_t begun = 0;
    if (r == rank() || !(state >> begun) || begun + 1 != watched_->sequence.load()) continue;
    MessageCounts with;
    int peer = -1;
    char mark = 0;
    while (state >> mark >> peer >> mark >> with.sends >> mark >> with.sends_done >> mark >> with.receives >> mark >>
           with.receives_done) {
      if (peer != rank()) continue;
      const MessageCounts& mine = counts_[static_cast<std::size_t>(r)];
      if (with.sends != with.sends_done && with.sends_done == mine.receives_done)
        return fmt::format("rank {} sends a message to rank {}", r, rank());
      if (with.receives != with.receives_done && with.receives_done == mine.sends_done)
        return fmt::format("rank {} waits to receive a message from rank {}", r, rank());
    }
  }
  return {};
}

std::vector<int> GlooBackend::behind(std::uint64_t collective) const {
  std::vector<int> result;
  if (size() > 1 && setup_.pulse->is_store_silent()) return result;
  for (const int world_rank : setup_.watch->behind(*watched_, collective))
    for (int r = 0; r < size(); ++r)
      if (setup_.members[static_cast<std::size_t>(r)] == world_rank) result.push_back(r);
  return result;
}

int GlooBackend::next_message_tag(int destination) {
  const std::uint32_t number = messages_[static_cast<std::size_t>(destination)]++;
  return static_cast<int>(number % kTagMessages) * 2 + 1;
}

std::string gloo_error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    const std::string text = caught.what_without_backtrace();
    return text.substr(0, text.find('\n'));
  } catch (const std::exception& caught) {
    const std::string text = caught.what();
    return text.substr(0, text.find('\n'));
  } catch (...) {
    return "unknown error";
  }
}

std::shared_ptr<Communicator> make_gloo_communicator(std::shared_ptr<Store> store, int rank, int world_size,
                                                     GlooOptions options) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw ConfigError(fmt::format("rank {} of a world of {}: expected ranks from 0", rank, world_size));
  // Every rank makes its communicators in the same order, so the count is a name that they agree on.
  const auto serial = store->add(fmt::format("gloo/made/{}", rank), 1);
  auto prefixed = std::make_shared<PrefixStore>(std::move(store), fmt::format("gloo/{}", serial));
  GlooBackend::Setup setup;
  setup.watch = std::make_shared<GroupWatch>(prefixed, rank, world_size);
  setup.store = prefixed;
  setup.id = "world";
  setup.members.resize(static_cast<std::size_t>(world_size));
  std::iota(setup.members.begin(), setup.members.end(), 0);
  setup.rank = rank;
  setup.host = options.host;
  setup.identity = options.identity.empty() ? PeerProcesses::identity() : options.identity;
  setup.pulse_options = {.heartbeat = heartbeat_limit(options.communicator.heartbeat),
                         .store_rank = options.store_rank};
  setup.connect_timeout = options.communicator.first_timeout;
  return std::make_shared<Communicator>(std::make_shared<GlooBackend>(std::move(setup)), options.communicator);
}

}  // namespace phalanx
