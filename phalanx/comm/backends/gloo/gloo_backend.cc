#include "phalanx/comm/backends/gloo/gloo_backend.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <future>
#include <sstream>
#include <system_error>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/gloo/gloo_group.h"
#include "phalanx/comm/futex.h"

namespace phalanx {
namespace {

// The communicator times operations out, because it knows more. gloo's own time-out only has to be longer.
constexpr std::chrono::milliseconds kGlooTimeout = std::chrono::hours(24 * 7);
// All ranks have arrived when they begin to connect.
constexpr std::chrono::milliseconds kConnectTimeout{30'000};
constexpr std::chrono::milliseconds kLookWhileMaking{100};
constexpr std::chrono::milliseconds kBlameWhileMaking{700};
constexpr std::chrono::milliseconds kLeaveGloo{200};

}  // namespace

GlooBackend::GlooBackend(Setup setup)
    : setup_(std::move(setup)), peers_(setup_.peers), counts_(peers_.members().size()) {
  try {
    if (size() > 1) join(std::make_shared<PrefixStore>(peers_.store(), peers_.id()));
  } catch (const CommError& error) {
    peers_.announce_abort(error.what());
    throw;
  }
}

void GlooBackend::join(const std::shared_ptr<Store>& store) {
  peers_.join(setup_.identity);
  gloo_ = connect(store);
  gloo_->setTimeout(kGlooTimeout);
  // No rank continues, and perhaps ends, while another is still connecting by gloo.
  PeerListener listener(setup_.host, store->derived_key("messages of group " + peers_.id()));
  const std::vector<std::string> offers = peers_.rendezvous("connected", listener.offer());
  std::vector<PeerSockets> sockets;
  try {
    sockets = listener.connect(rank(), offers, connect_timeout(), [this] { peers_.throw_if_peer_failed(); });
  } catch (const CommError& error) {
    throw_disconnected(error.what());
  }
  transport_ = std::make_unique<MessageTransport>(rank(), std::move(sockets),
                                                  [bell = bell_] { ring(bell->word, bell->sleepers, false); });
  peers_.end_wait();
}

std::chrono::milliseconds GlooBackend::connect_timeout() const {
  return std::min(peers_.connect_timeout(), kConnectTimeout);
}

// A broken connection is noticed before the store reports whose it was.
void GlooBackend::throw_disconnected(const std::string& what) {
  const auto patience = std::chrono::steady_clock::now() + kBlameWhileMaking;
  while (std::chrono::steady_clock::now() < patience) {
    peers_.throw_if_peer_failed();
    std::this_thread::sleep_for(kLookWhileMaking);
  }
  throw CommError(what);
}

// gloo cannot be interrupted while it connects, and would wait long for a rank that dies meanwhile. So a separate
// thread connects. When it has become useless it is abandoned, and ends by gloo's time-out.
c10::intrusive_ptr<c10d::Backend> GlooBackend::connect(const std::shared_ptr<Store>& store) {
  struct Connecting {
    std::mutex mutex;
    std::condition_variable ended;
    bool has_ended = false;
    c10::intrusive_ptr<c10d::Backend> group;
    std::string error;
  };
  auto connecting = std::make_shared<Connecting>();
  start_thread("the making of a group of gloo", [=, rank = rank(), size = size(), host = setup_.host,
                                                 timeout = connect_timeout()] {
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
    peers_.throw_if_peer_failed();
  if (connecting->group) return std::move(connecting->group);
  throw_disconnected(fmt::format("gloo cannot connect rank {} at {} with the {} ranks of group '{}': {}", rank(),
                                 setup_.host, size(), peers_.id(), connecting->error));
}

namespace {

// gloo's destructor waits for the collective in flight, and no call of gloo ends that. A receive that times out breaks
// its connections, which does. One on a connection that is broken already breaks no other, and the connection to a
// stopped rank does not break by itself. So every peer is tried.
void break_connections(c10d::Backend& gloo, int rank, int size) {
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    try {
      std::vector<at::Tensor> byte{at::empty({1}, at::kByte)};
      gloo.recv(byte, peer, 0)->wait(std::chrono::milliseconds(1));
    } catch (...) {
    }
  }
}

}  // namespace

// Nor can gloo cancel a write to a stopped rank. After a failure its destructor gets a moment; then it is abandoned in a
// thread.
GlooBackend::~GlooBackend() {
  if (!gloo_ || !abort_.is_set()) return;
  auto ended = std::make_shared<std::promise<void>>();
  std::future<void> end = ended->get_future();
  // The thread holds the last reference, so the thread does the waiting.
  auto last = std::make_shared<decltype(gloo_)>(std::move(gloo_));
  try {
    std::thread([ended, last, rank = rank(), size = size()] {
      break_connections(**last, rank, size);
      last->reset();
      ended->set_value();
    }).detach();
  } catch (const std::system_error&) {
    return;  // no thread available: it is destroyed here, however long that takes
  }
  end.wait_for(kLeaveGloo);
}

std::unique_ptr<Operation> GlooBackend::start(const OperationDescription& description) {
  throw_if_aborted();
  return description.transfers.empty() ? make_gloo_collective(*this, description)
                                       : make_gloo_messages(*this, description);
}

std::shared_ptr<Backend> GlooBackend::split(const SplitRequest& request) {
  throw_if_aborted();
  if (request.members.empty()) return nullptr;
  Setup setup = setup_;
  setup.peers = peers_.split(request.serial, request.members, request.rank);
  return std::make_shared<GlooBackend>(std::move(setup));
}

void GlooBackend::abort(const std::string& reason) noexcept {
  const bool is_first = abort_.set(reason);
  // The peers notice this first. Then they learn the reason from the store. After it no thread uses the memory of a
  // message: every caller waits for that, not only the first, as each frees its messages next.
  if (transport_) transport_->abort(collectives_done_);
  if (!is_first) return;
  ring(bell_->word, bell_->sleepers, false);
  if (gloo_) peers_.announce_abort(reason);
}

void GlooBackend::check_ranks() {
  throw_if_aborted();
  if (const std::string why = peers_.failure_reason(); !why.empty()) throw CommError(why);
}

// "collectives begun; peer:sends,done,receives,done; ..."
std::string GlooBackend::waits_text() const {
  std::string text = std::to_string(peers_.collectives_begun());
  for (std::size_t peer = 0; peer < counts_.size(); ++peer) {
    const MessageCounts& with = counts_[peer];
    if (with.sends != with.sends_done || with.receives != with.receives_done)
      text += fmt::format("; {}:{},{},{},{}", peer, with.sends, with.sends_done, with.receives, with.receives_done);
  }
  return text;
}

std::string GlooBackend::stall_reason() const {
  if (size() == 1) return {};
  const std::vector<std::string> states = peers_.states();
  for (int r = 0; r < size(); ++r) {
    std::istringstream state(states[static_cast<std::size_t>(r)]);
    std::uint64_t begun = 0;
    if (r == rank() || !(state >> begun) || begun + 1 != peers_.collectives_begun()) continue;
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
  // Every rank makes its communicators in the same order, so all ranks agree on this number.
  const auto serial = store->add(fmt::format("gloo/made/{}", rank), 1);
  auto prefixed = std::make_shared<PrefixStore>(std::move(store), fmt::format("gloo/{}", serial));
  const HeartbeatMonitor peers(prefixed, rank, world_size,
                               {.backend = "gloo",
                                .heartbeat = heartbeat_limit(options.communicator.heartbeat),
                                .store_rank = options.store_rank,
                                .connect_timeout = options.communicator.first_timeout});
  GlooBackend::Setup setup{.peers = peers,
                           .identity = options.identity.empty() ? ProcessProbe::identity() : options.identity,
                           .host = std::move(options.host)};
  return std::make_shared<Communicator>(std::make_shared<GlooBackend>(std::move(setup)), options.communicator);
}

}  // namespace phalanx
