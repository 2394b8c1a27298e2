#include "phalanx/comm/backends/gloo/gloo_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/futex.h"

namespace phalanx {
namespace {

// All ranks have arrived when they begin to connect.
constexpr std::chrono::milliseconds kConnectTimeout{30'000};
constexpr std::chrono::milliseconds kLookWhileMaking{100};
constexpr std::chrono::milliseconds kBlameWhileMaking{700};

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
  PeerListener listener(setup_.host, store->derived_key("messages of group " + peers_.id()));
  const std::vector<std::string> offers = peers_.rendezvous("connected", listener.offer());
  std::vector<PeerSockets> sockets;
  try {
    sockets = listener.connect(rank(), offers, std::min(peers_.connect_timeout(), kConnectTimeout),
                               [this] { peers_.throw_if_peer_failed(); });
  } catch (const CommError& error) {
    throw_disconnected(error.what());
  }
  transport_ = std::make_unique<MessageTransport>(rank(), std::move(sockets),
                                                  [bell = bell_] { ring(bell->word, bell->sleepers, false); });
  peers_.end_wait();
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
  if (transport_) peers_.announce_abort(reason);
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
