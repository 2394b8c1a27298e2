// A link between two programs that can be made bad: a TCP proxy on loopback, on a thread of its own (tests only; netem,
// which does this to whole interfaces, may be absent).
//
// Every connection to address() is carried on to the target, byte for byte, by way of pieces of at most 16 KiB. It can
// be slow, lose packets as TCP shows that to programs (a piece comes 200 ms late, the first retransmission's time-out,
// and all behind it wait), stand still in both directions while it stays open, or break.
//
//   TcpStoreServer server;
//   TcpProxy link(server.address());
//   TcpStore client(link.address());
//   link.stall();                        // the client's next question gets no answer
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
  /// From now on, each way.
  void delay(std::chrono::milliseconds each_way);
  /// Of that many pieces one is lost; 0: none.
  void lose_one_of(int pieces);
  void stall();
  void resume();
  /// Breaks all connections, and those that come later at once.
  void cut();
  /// What has been carried so far, both ways together.
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
