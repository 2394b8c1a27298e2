#include "phalanx/comm/backends/gloo/message_transport.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/base/remedy.h"
#include "phalanx/base/start_thread.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kStop = ~std::uint64_t{0};

}  // namespace

MessageTransport::MessageTransport(int rank, std::vector<PeerSockets> peers, std::function<void()> on_change)
    : on_change_(std::move(on_change)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(peers.size()) {
  if (!epoll_ || !stop_)
    throw CommError(fmt::format("the messages between ranks: {}", with_remedy(std::strerror(errno))));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kStop}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stop_.get(), &event);
  for (std::size_t peer = 0; peer < peers.size(); ++peer) {
    if (static_cast<int>(peer) == rank) continue;
    peers_[peer].to = std::make_unique<OutgoingLink>(std::move(peers[peer].to), rank, static_cast<int>(peer));
    peers_[peer].from = std::make_unique<IncomingLink>(std::move(peers[peer].from), rank, static_cast<int>(peer));
    watch(peer * 2, EPOLL_CTL_ADD);
    watch(peer * 2 + 1, EPOLL_CTL_ADD);
  }
  thread_ = start_thread("the messages between ranks", [this] { run(); });
}

MessageTransport::~MessageTransport() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

MessageLink& MessageTransport::link(std::uint64_t number) const {
  const Peer& peer = peers_[number / 2];
  return number % 2 == 0 ? static_cast<MessageLink&>(*peer.to) : *peer.from;
}

std::shared_ptr<Message> MessageTransport::post(const Transfer& transfer) {
  auto message = std::make_shared<Message>(transfer);
  const std::uint64_t number = static_cast<std::uint64_t>(transfer.peer) * 2 + (transfer.is_send ? 0 : 1);
  bool changed = false;
  {
    const std::lock_guard lock(mutex_);
    link(number).post(message);
    if (link(number).wants_to_write()) link(number).write();
    changed = settle(number);
  }
  if (changed) on_change_();
  return message;
}

void MessageTransport::abort(std::int64_t collectives_done) noexcept {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    if (!peer.to) continue;
    peer.from->give_up(collectives_done);
    peer.to->close("this rank has given up the group");
  }
}

int MessageTransport::gave_up_before(std::uint64_t collective) const noexcept {
  const std::uint64_t first = gave_up_.load(std::memory_order_acquire), ranks = peers_.size();
  return first / ranks <= collective ? static_cast<int>(first % ranks) : -1;
}

// Tells epoll what the link waits for.
void MessageTransport::watch(std::uint64_t number, int action) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = number}};
  if (link(number).wants_to_write()) event.events |= EPOLLOUT;
  std::uint32_t& watched = peers_[number / 2].watched[number % 2];
  if (event.events != watched) epoll_ctl(epoll_.get(), action, link(number).fd(), &event);
  watched = event.events;
}

// After a link has been used. True if somebody may wait for what has changed.
bool MessageTransport::settle(std::uint64_t number) {
  if (link(number).is_open()) watch(number, EPOLL_CTL_MOD);
  const std::size_t rank = number / 2;
  if (const std::int64_t done = number % 2 == 0 ? peers_[rank].to->gave_up_after() : -1; done >= 0)
    gave_up_ = std::min<std::uint64_t>(gave_up_, static_cast<std::uint64_t>(done) * peers_.size() + rank);
  return link(number).take_progress();
}

bool MessageTransport::handle(std::uint64_t number, std::uint32_t events) {
  const std::lock_guard lock(mutex_);
  MessageLink& used = link(number);
  if (used.is_open() && (events & ~std::uint32_t{EPOLLOUT}) != 0) used.read();
  if (used.is_open() && used.wants_to_write()) used.write();
  return settle(number);
}

void MessageTransport::run() {
  pthread_setname_np(pthread_self(), "phalanx-p2p");
  std::array<epoll_event, 64> events;
  for (;;) {
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
    bool changed = false;
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == kStop) return;
      changed |= handle(event.data.u64, event.events);
    }
    if (changed) on_change_();
  }
}

}  // namespace phalanx
