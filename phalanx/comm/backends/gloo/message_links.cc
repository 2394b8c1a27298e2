#include "phalanx/comm/backends/gloo/message_links.h"

#include <fmt/format.h>
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/base/remedy.h"
#include "phalanx/comm/types.h"

namespace phalanx {
namespace {

constexpr std::size_t kMaxBytes = 1 << 20;     // of data in one call
constexpr std::size_t kReadAhead = 64 * 1024;  // read beyond the current message
constexpr std::size_t kMaxSegments = 32;       // of one write: frames and data of up to half as many messages
constexpr std::size_t kFrameBytes = sizeof(MessageFrame);

MessageFrame frame_of(const Transfer& transfer) {
  return {.count = transfer.count, .tag = transfer.tag, .dtype = transfer.dtype};
}
std::string_view bytes_of(const MessageFrame& frame) { return {reinterpret_cast<const char*>(&frame), kFrameBytes}; }
bool is_valid(const MessageFrame& frame) {
  return frame.count >= 0 && (frame.tag >= 0 || frame.tag == kCollectiveTag) && frame.dtype <= DataType::boolean;
}
bool is_same(const MessageFrame& a, const MessageFrame& b) { return a.count == b.count && a.dtype == b.dtype; }

std::string mismatch_text(int sender, const MessageFrame& sent, int receiver, const MessageFrame& asked) {
  return fmt::format("rank {} sends {}[{}] under tag {} and rank {} receives {}[{}]", sender, name_of(sent.dtype),
                     sent.count, sent.tag, receiver, name_of(asked.dtype), asked.count);
}

// The first of the values under a tag; the tag's entry ends with the last.
template <class Map>
auto take_first(Map& waiting, typename Map::iterator place) {
  auto first = std::move(place->second.front());
  place->second.pop_front();
  if (place->second.empty()) waiting.erase(place);
  return first;
}

// Cuts a frame off the front; false if the bytes are less than one. `partial` holds the bytes of an incomplete one.
bool take_frame_bytes(std::string& partial, std::string_view& bytes, MessageFrame& frame) {
  const std::size_t part = std::min(kFrameBytes - partial.size(), bytes.size());
  partial += bytes.substr(0, part);
  bytes.remove_prefix(part);
  if (partial.size() < kFrameBytes) return false;
  std::memcpy(&frame, partial.data(), kFrameBytes);
  partial.clear();
  return true;
}

}  // namespace

std::size_t Message::bytes() const noexcept {
  return static_cast<std::size_t>(transfer_.count) * element_size(transfer_.dtype);
}

bool MessageLink::has_moved(ssize_t result) {
  if (result > 0) return true;
  if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  close(result == 0 ? fmt::format("rank {} has closed its connection", peer_)
                    : fmt::format("the connection to rank {} is broken: {}", peer_, std::strerror(errno)));
  return false;
}

void MessageLink::join_epoll(int epoll, std::uint64_t number) {
  epoll_ = epoll;
  number_ = number;
  if (!set_epoll(EPOLLIN))
    throw CommError(
        fmt::format("cannot watch the connection to rank {}: {}", peer_, with_remedy(std::strerror(errno))));
}

void MessageLink::update_epoll() {
  if (!is_open()) return;
  if (!set_epoll((wants_to_read() ? EPOLLIN : 0U) | (wants_to_write() ? EPOLLOUT : 0U)))
    close(fmt::format("cannot watch the connection to rank {}: {}", peer_, with_remedy(std::strerror(errno))));
}

// A socket for which nothing is awaited leaves epoll, which would report errors for ever.
bool MessageLink::set_epoll(std::uint32_t events) noexcept {
  if (events == watched_) return true;
  epoll_event event{.events = events, .data = {.u64 = number_}};
  const int action = watched_ == 0 ? EPOLL_CTL_ADD : events == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
  if (epoll_ctl(epoll_, action, fd(), &event) != 0) return false;
  watched_ = events;
  return true;
}

// A forked process may hold the socket, too. So closing it would end neither the connection nor what epoll reports.
void MessageLink::close(const ErrorText& error) noexcept {
  if (!is_open()) return;
  error_ = error;
  set_epoll(0);
  shutdown(fd(), SHUT_RDWR);
  socket_.reset();
  fail_all();
}

// If something before it has not been written yet, the peer only sees that the connection ends.
void MessageLink::give_up(std::int64_t collectives_done, const ErrorText& error) noexcept {
  const MessageFrame frame{.count = collectives_done, .tag = kGaveUpTag};
  if (is_open() && !wants_to_write()) send(fd(), &frame, kFrameBytes, MSG_NOSIGNAL);
  close(error);
}

void MessageLink::take_notice(const MessageFrame& frame) noexcept {
  gave_up_after_ = std::max<std::int64_t>(frame.count, 0);
  has_progress_ = true;
}

void MessageLink::done(Message& message) noexcept {
  message.is_done_.store(true, std::memory_order_release);
  has_progress_ = true;
}

void MessageLink::fail(Message& message) noexcept {
  message.error_ = error_;
  done(message);
}

void MessageLink::fail(ByTag<Pointer>& messages) noexcept {
  for (auto& [tag, waiting] : messages)
    for (const Pointer& message : waiting) fail(*message);
  messages.clear();
}

void OutgoingLink::post(Pointer message) {
  if (!is_open()) return fail(*message);
  const int tag = message->transfer().tag;
  if (tag == kCollectiveTag) return match(message, frame_of(message->transfer()));
  const auto request = requests_.find(tag);
  if (request == requests_.end())
    sends_[tag].push_back(std::move(message));
  else
    match(std::move(message), take_first(requests_, request));
}

void OutgoingLink::match(Pointer message, const MessageFrame& request) {
  const MessageFrame frame = frame_of(message->transfer());
  const bool is_good = is_same(frame, request);
  if (!is_good) message->mismatch_ = mismatch_text(self_, frame, peer_, request);
  const std::size_t bytes = is_good ? message->bytes() : 0;
  queue_.push_back({std::move(message), frame, bytes});
}

void OutgoingLink::take_request(const MessageFrame& request) {
  const auto send = sends_.find(request.tag);
  if (send == sends_.end())
    requests_[request.tag].push_back(request);
  else
    match(take_first(sends_, send), request);
}

void OutgoingLink::read() {
  std::array<char, 4096> buffer;
  const ssize_t got = recv(fd(), buffer.data(), buffer.size(), 0);
  if (!has_moved(got)) return;
  std::string_view bytes(buffer.data(), static_cast<std::size_t>(got));
  for (MessageFrame request; take_frame_bytes(received_, bytes, request);) {
    if (request.tag == kGaveUpTag) {
      take_notice(request);
      continue;
    }
    if (!is_valid(request)) return close(fmt::format("rank {} sends a malformed request", peer_));
    take_request(request);
  }
}

void OutgoingLink::write() {
  std::array<iovec, kMaxSegments> segments;
  std::size_t count = 0, skip = written_, room = kMaxBytes;
  const auto add = [&](const void* data, std::size_t size) {
    const std::size_t skipped = std::min(skip, size), part = std::min(size - skipped, room);
    skip -= skipped;
    room -= part;
    if (part > 0) segments[count++] = {static_cast<char*>(const_cast<void*>(data)) + skipped, part};
  };
  for (const Queued& queued : queue_) {
    if (room == 0 || count + 2 > kMaxSegments) break;
    add(&queued.frame, kFrameBytes);
    add(queued.message->transfer().data, queued.bytes);
  }
  msghdr header{};
  header.msg_iov = segments.data();
  header.msg_iovlen = count;
  const ssize_t sent = sendmsg(fd(), &header, MSG_NOSIGNAL);
  if (has_moved(sent)) count_written(static_cast<std::size_t>(sent));
}

void OutgoingLink::count_written(std::size_t bytes) {
  written_ += bytes;
  while (!queue_.empty() && written_ >= kFrameBytes + queue_.front().bytes) {
    written_ -= kFrameBytes + queue_.front().bytes;
    done(*queue_.front().message);
    queue_.pop_front();
  }
}

bool OutgoingLink::has_unconfirmed() const noexcept {
  int bytes = 0;
  return is_open() && ioctl(fd(), SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

void OutgoingLink::fail_all() noexcept {
  for (const Queued& queued : queue_) fail(*queued.message);
  queue_.clear();
  fail(sends_);
}

void IncomingLink::post(Pointer message) {
  if (!is_open()) return fail(*message);
  const int tag = message->transfer().tag;
  if (tag != kCollectiveTag) requests_ += bytes_of(frame_of(message->transfer()));
  receives_[tag].push_back(std::move(message));
  if (tag == kCollectiveTag && early_) read_on();
}

void IncomingLink::read_on() {
  const MessageFrame frame = *std::exchange(early_, std::nullopt);
  const std::string unread = std::move(unread_);
  take_frame(frame);
  if (is_open()) take(unread);
  if (is_open() && wants_to_read()) read();
}

void IncomingLink::write() {
  const ssize_t sent = send(fd(), requests_.data(), requests_.size(), MSG_NOSIGNAL);
  if (has_moved(sent)) requests_.erase(0, static_cast<std::size_t>(sent));
}

// Data of the current message go straight to its memory; what follows them goes through a buffer.
void IncomingLink::read() {
  std::array<char, kReadAhead> buffer;
  const std::size_t rest = current_ ? std::min(current_->bytes() - read_, kMaxBytes) : 0;
  std::array<iovec, 2> segments{{{nullptr, 0}, {buffer.data(), buffer.size()}}};
  if (rest > 0) segments[0] = {static_cast<char*>(current_->transfer().data) + read_, rest};
  const ssize_t got = readv(fd(), segments.data(), static_cast<int>(segments.size()));
  if (!has_moved(got)) return;
  const std::size_t direct = std::min(static_cast<std::size_t>(got), rest);
  if (rest > 0) count_read(direct);
  take({buffer.data(), static_cast<std::size_t>(got) - direct});
}

void IncomingLink::take(std::string_view bytes) {
  while (!bytes.empty()) {
    if (current_) {
      const std::size_t part = std::min(current_->bytes() - read_, bytes.size());
      std::memcpy(static_cast<char*>(current_->transfer().data) + read_, bytes.data(), part);
      bytes.remove_prefix(part);
      count_read(part);
    } else if (MessageFrame frame; take_frame_bytes(received_, bytes, frame)) {
      take_frame(frame);
      if (early_) unread_ = bytes;
      if (early_ || !is_open()) return;
    }
  }
}

void IncomingLink::take_frame(const MessageFrame& frame) {
  if (frame.tag == kGaveUpTag) return take_notice(frame);
  const auto receive = receives_.find(frame.tag);
  if (receive == receives_.end() && frame.tag == kCollectiveTag && is_valid(frame)) {
    early_ = frame;
    return;
  }
  if (!is_valid(frame) || receive == receives_.end())
    return close(fmt::format("rank {} sends a message that this rank has not requested", peer_));
  current_ = take_first(receives_, receive);
  read_ = 0;
  const MessageFrame asked = frame_of(current_->transfer());
  if (is_same(frame, asked)) return count_read(0);
  current_->mismatch_ = mismatch_text(peer_, frame, self_, asked);
  done(*std::exchange(current_, nullptr));
}

void IncomingLink::count_read(std::size_t bytes) {
  read_ += bytes;
  if (read_ == current_->bytes()) done(*std::exchange(current_, nullptr));
}

void IncomingLink::fail_all() noexcept {
  if (current_) fail(*std::exchange(current_, nullptr));
  fail(receives_);
}

}  // namespace phalanx
