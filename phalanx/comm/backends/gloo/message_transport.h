// MessageTransport: the point-to-point messages of a group over connected sockets (peer_sockets.h). One thread serves
// all messages of the group; it sleeps until a socket is ready. Torch-free.
//
// - post() never blocks. It writes at once what the socket takes.
// - Messages between two ranks match by tag, in the order of posting. A send ends only after its receive is posted.
// - A rank that destroys its transport closes its connections in order: what it has sent still arrives. A rank that
//   calls abort() resets them, which its peers notice at once.
//
//   auto message = transport.post({.is_send = false, .data = buffer, .count = 8, .dtype = DataType::f32, .peer = 1});
//   while (!message->is_done()) sleep_until_rung();
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/comm/backends/gloo/message_links.h"
#include "phalanx/comm/backends/gloo/peer_sockets.h"

namespace phalanx {

class MessageTransport {
 public:
  /// on_change(): some thread calls it after messages are done, or a rank has given up. It must not call the transport.
  /// Throws CommError or Error if the system gives no descriptor or no thread.
  MessageTransport(int rank, std::vector<PeerSockets> peers, std::function<void()> on_change);
  ~MessageTransport();
  MessageTransport(const MessageTransport&) = delete;
  MessageTransport& operator=(const MessageTransport&) = delete;

  /// REQUIRES: the peer is another rank. The memory stays until the message is done, or abort() has returned.
  std::shared_ptr<Message> post(const Transfer& transfer);

  /// Resets all connections. Every message that is not done fails. Any thread may call it. Never blocks.
  /// ENSURES: the memory of no transfer is used any more.
  void abort() noexcept;

  /// A rank that has given up, or -1.
  int gave_up() const noexcept { return gave_up_.load(std::memory_order_acquire); }

 private:
  struct Watched {
    std::unique_ptr<MessageLink> link;
    int peer = 0;
    std::uint32_t events = 0;  // that epoll waits for
  };
  std::size_t index_of(int peer, bool is_send) const { return static_cast<std::size_t>(peer) * 2 + (is_send ? 0 : 1); }
  void add(UniqueFd socket, int peer, bool is_send);
  void watch(std::size_t index);
  bool handle(std::size_t index, std::uint32_t events);
  bool settle(std::size_t index);
  void run();

  const int rank_;
  const std::function<void()> on_change_;
  std::atomic<int> gave_up_{-1};
  UniqueFd epoll_, stop_;
  std::mutex mutex_;  // for the links
  std::vector<Watched> links_;
  std::thread thread_;
};

}  // namespace phalanx
