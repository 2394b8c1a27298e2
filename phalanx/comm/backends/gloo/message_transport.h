// MessageTransport: the messages of a group, and of its collectives, over connected sockets (peer_sockets.h). One
// thread serves them all; it sleeps until a socket is ready. Torch-free.
//
// - post() never blocks. It writes at once what the socket takes.
// - Messages between two ranks match by tag, in the order of posting. A send ends only after its receive is posted,
//   except under kCollectiveTag.
// - A rank that destroys its transport closes its connections. What it has sent still arrives, if its peers' systems
//   take it within 2 s; so long it waits. Then messages with it fail.
// - A rank that calls abort() closes them at once, and tells its peers that it gives up, so that their collectives can
//   fail, too.
//
//   auto message = transport.post({.is_send = false, .data = buffer, .count = 8, .dtype = DataType::f32, .peer = 1});
//   while (!message->is_done()) sleep_until_rung();
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "phalanx/comm/backends/gloo/message_links.h"
#include "phalanx/comm/backends/gloo/peer_sockets.h"

namespace phalanx {

class MessageTransport {
 public:
  /// on_change(): some thread calls it after messages are done, or a rank has given up. It must not call the transport.
  /// If it throws on the transport's thread, or that thread has no memory, all messages fail.
  /// Throws CommError or Error if the system gives no descriptor or no thread.
  MessageTransport(int rank, std::vector<PeerSockets> peers, std::function<void()> on_change);
  ~MessageTransport();
  MessageTransport(const MessageTransport&) = delete;
  MessageTransport& operator=(const MessageTransport&) = delete;

  /// REQUIRES: the peer is another rank. The memory stays until the message is done, or abort() has returned.
  std::shared_ptr<Message> post(const Transfer& transfer);

  /// Closes all connections. Every message that is not done fails. Any thread may call it. Never blocks.
  /// `collectives_done`: how many collectives this rank has completed, for its peers' gave_up_before().
  /// ENSURES: the memory of no transfer is used any more.
  void abort(std::int64_t collectives_done) noexcept;

  /// A rank that has given up before it had done the collective of this number (from 0); -1: none has.
  int gave_up_before(std::uint64_t collective) const noexcept;

 private:
  struct Peer {
    std::unique_ptr<OutgoingLink> to;
    std::unique_ptr<IncomingLink> from;
  };
  // A link has a number: twice the peer's rank, plus 1 for what comes from it.
  MessageLink& link(std::uint64_t number) const;
  bool settle(std::uint64_t number);
  bool handle(std::uint64_t number, std::uint32_t events);
  void serve();
  void run() noexcept;
  void close_all(const ErrorText& error) noexcept;
  void fail_all(const std::exception& error) noexcept;
  bool has_unconfirmed();
  void await_confirmed();

  const std::function<void()> on_change_;
  const ErrorText gave_this_up_, out_of_memory_;           // made before they are needed
  std::atomic<std::uint64_t> gave_up_{~std::uint64_t{0}};  // the smallest of: collectives done * ranks + rank
  UniqueFd epoll_, stop_;
  std::mutex mutex_;  // for the links
  std::vector<Peer> peers_;
  std::thread thread_;
};

}  // namespace phalanx
