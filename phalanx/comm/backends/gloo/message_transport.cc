#include "phalanx/comm/backends/gloo/message_transport.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

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
    : rank_(rank),
      on_change_(std::move(on_change)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      links_(peers.size() * 2) {
  if (!epoll_ || !stop_)
    throw CommError(fmt::format("the messages between ranks: {}", with_remedy(std::strerror(errno))));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kStop}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stop_.get(), &event);
  for (std::size_t peer = 0; peer < peers.size(); ++peer) {
    if (static_cast<int>(peer) == rank) continue;
    add(std::move(peers[peer].to), static_cast<int>(peer), true);
    add(std::move(peers[peer].from), static_cast<int>(peer), false);
  }
  thread_ = start_thread("the messages between ranks", [this] { run(); });
}

MessageTransport::~MessageTransport() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void MessageTransport::add(UniqueFd socket, int peer, bool is_send) {
  const std::size_t index = index_of(peer, is_send);
  Watched& watched = links_[index];
  watched.peer = peer;
  watched.events = EPOLLIN;
  epoll_event event{.events = EPOLLIN, .data = {.u64 = index}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.get(), &event);
  if (is_send)
    watched.link = std::make_unique<OutgoingLink>(std::move(socket), rank_, peer);
  else
    watched.link = std::make_unique<IncomingLink>(std::move(socket), rank_, peer);
}

std::shared_ptr<Message> MessageTransport::post(const Transfer& transfer) {
  auto message = std::make_shared<Message>(transfer);
  const std::size_t index = index_of(transfer.peer, transfer.is_send);
  bool changed = false;
  {
    const std::lock_guard lock(mutex_);
    MessageLink& link = *links_[index].link;
    link.post(message);
    if (link.is_open() && link.wants_to_write()) link.write();
    changed = settle(index);
  }
  if (changed) on_change_();
  return message;
}

void MessageTransport::abort() noexcept {
  const std::lock_guard lock(mutex_);
  for (Watched& watched : links_)
    if (watched.link) watched.link->reset("this rank has given up the group");
}

// Asks epoll for what the link waits for.
void MessageTransport::watch(std::size_t index) {
  Watched& watched = links_[index];
  const std::uint32_t wanted = watched.link->wants_to_write() ? EPOLLIN | EPOLLOUT : EPOLLIN;
  if (!watched.link->is_open() || wanted == watched.events) return;
  watched.events = wanted;
  epoll_event event{.events = wanted, .data = {.u64 = index}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, watched.link->fd(), &event);
}

// After a link has been used. True if somebody may wait for what has changed.
bool MessageTransport::settle(std::size_t index) {
  watch(index);
  const Watched& watched = links_[index];
  int nobody = -1;
  if (watched.link->was_reset()) gave_up_.compare_exchange_strong(nobody, watched.peer);
  return watched.link->take_progress();
}

bool MessageTransport::handle(std::size_t index, std::uint32_t events) {
  const std::lock_guard lock(mutex_);
  MessageLink& link = *links_[index].link;
  if (link.is_open() && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) link.read();
  if (link.is_open() && link.wants_to_write()) link.write();
  return settle(index);
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
