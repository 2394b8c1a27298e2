// A link between two programs that can be made bad: a TCP proxy on loopback, on a separate thread. Tests only. (netem
// does this to whole interfaces, but may be absent.)
//
// Every connection to address() is forwarded to the target, byte for byte, in pieces of at most 16 KiB. The link can
// - be slow,
// - lose packets, as TCP shows that to programs: a piece comes 200 ms late (the time-out of the first retransmission),
//   and everything behind it waits,
// - stall in both directions while it stays open,
// - or break.
//
//   TcpStoreServer server;
//   TcpProxy link(server.address());
//   TcpStore client(link.address());
//   link.stall();                        // the client's next request gets no answer
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

class TcpProxy {
 public:
  explicit TcpProxy(HostPort target);
  ~TcpProxy();  // breaks what is open
  TcpProxy(const TcpProxy&) = delete;
  TcpProxy& operator=(const TcpProxy&) = delete;

  HostPort address() const { return address_; }
  /// Delays each direction from now on.
  void delay(std::chrono::milliseconds each_way);
  /// One of that many pieces is lost; 0: none.
  void lose_one_of(int pieces);
  void stall();
  void resume();
  /// Breaks all connections; later ones break at once.
  void cut();
  /// The bytes forwarded so far, in both directions together.
  std::int64_t bytes() const { return bytes_.load(); }

 private:
  struct Connection;
  void serve();
  void wake();
  void accept_one();
  void take_from(Connection& connection, int i);
  void pass_on_to(Connection& connection, int i);

  const HostPort target_;
  UniqueFd listener_, wake_;
  HostPort address_;
  std::vector<std::unique_ptr<Connection>> connections_;  // the thread's own
  std::atomic<std::int64_t> delay_ms_{0}, bytes_{0};
  std::atomic<int> lose_one_of_{0};
  std::atomic<bool> stalled_{false}, cut_{false}, stopping_{false};
  int pieces_ = 0;
  std::thread thread_;
};

}  // namespace phalanx
