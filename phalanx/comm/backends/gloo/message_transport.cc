#include "phalanx/comm/backends/gloo/message_transport.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>

#include "phalanx/base/error.h"
#include "phalanx/base/remedy.h"
#include "phalanx/base/start_thread.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kStop = ~std::uint64_t{0};
constexpr std::chrono::milliseconds kConfirmTimeout{2000}, kConfirmInterval{1};

}  // namespace

MessageTransport::MessageTransport(int rank, std::vector<PeerSockets> peers, std::function<void()> on_change)
    : on_change_(std::move(on_change)),
      gave_this_up_(std::make_shared<const std::string>("this rank has given up the group")),
      out_of_memory_(std::make_shared<const std::string>("the thread that serves the messages has no memory left")),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(peers.size()) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kStop}};
  if (!epoll_ || !stop_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stop_.get(), &event) != 0)
    throw CommError(fmt::format("the messages between ranks: {}", with_remedy(std::strerror(errno))));
  for (std::size_t peer = 0; peer < peers.size(); ++peer) {
    if (static_cast<int>(peer) == rank) continue;
    peers_[peer].to = std::make_unique<OutgoingLink>(std::move(peers[peer].to), rank, static_cast<int>(peer));
    peers_[peer].from = std::make_unique<IncomingLink>(std::move(peers[peer].from), rank, static_cast<int>(peer));
    for (const std::uint64_t number : {peer * 2, peer * 2 + 1}) link(number).join_epoll(epoll_.get(), number);
  }
  thread_ = start_thread("the messages between ranks", [this] { run(); });
}

MessageTransport::~MessageTransport() {
  await_confirmed();
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
  close_all(gave_this_up_);
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
    peer.from->give_up(collectives_done, gave_this_up_);
    peer.to->give_up(collectives_done, gave_this_up_);
  }
}

int MessageTransport::gave_up_before(std::uint64_t collective) const noexcept {
  const std::uint64_t first = gave_up_.load(std::memory_order_acquire), ranks = peers_.size();
  return first / ranks <= collective ? static_cast<int>(first % ranks) : -1;
}

// A closed connection on which a request still arrives is reset, and what has not reached the peer's system is lost.
void MessageTransport::await_confirmed() {
  const auto deadline = std::chrono::steady_clock::now() + kConfirmTimeout;
  while (has_unconfirmed() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(kConfirmInterval);
}

bool MessageTransport::has_unconfirmed() {
  const std::lock_guard lock(mutex_);
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.to && peer.to->has_unconfirmed(); });
}

// After a link has been used. True if somebody may wait for what has changed.
bool MessageTransport::settle(std::uint64_t number) {
  link(number).update_epoll();
  const std::size_t rank = number / 2;
  if (const std::int64_t done = link(number).gave_up_after(); done >= 0)
    gave_up_ = std::min<std::uint64_t>(gave_up_, static_cast<std::uint64_t>(done) * peers_.size() + rank);
  return link(number).take_progress();
}

bool MessageTransport::handle(std::uint64_t number, std::uint32_t events) {
  const std::lock_guard lock(mutex_);
  MessageLink& used = link(number);
  if (used.is_open() && used.wants_to_read() && (events & ~std::uint32_t{EPOLLOUT}) != 0) used.read();
  if (used.is_open() && used.wants_to_write()) used.write();
  return settle(number);
}

void MessageTransport::run() noexcept {
  pthread_setname_np(pthread_self(), "phalanx-p2p");
  try {
    serve();
  } catch (const std::exception& error) {
    fail_all(error);
  }
}

void MessageTransport::serve() {
  std::array<epoll_event, 64> events;
  for (;;) {
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
    if (count < 0 && errno != EINTR) throw CommError(fmt::format("epoll_wait: {}", std::strerror(errno)));
    bool changed = false;
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == kStop) return;
      changed |= handle(event.data.u64, event.events);
    }
    if (changed) on_change_();
  }
}

void MessageTransport::close_all(const ErrorText& error) noexcept {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    if (!peer.to) continue;
    peer.from->close(error);
    peer.to->close(error);
  }
}

void MessageTransport::fail_all(const std::exception& error) noexcept {
  ErrorText text = out_of_memory_;
  try {
    text = std::make_shared<const std::string>(fmt::format("the thread that serves the messages: {}", error.what()));
  } catch (const std::bad_alloc&) {
  }
  close_all(text);
  try {
    on_change_();
  } catch (...) {  // those who wait look again within 100 ms
  }
}

}  // namespace phalanx
