// How a connection to the store begins, on both sides. First the versions; then, if the store has a secret, each side
// proves to the other that it knows it (tcp_store_wire.h has the bytes). Only the store's server and client use this.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx {

class SocketInterrupt;

/// The server's side, without I/O: the caller passes the received bytes and sends the returned answer. It never needs
/// more than 76 bytes from an unauthenticated client.
class StoreHandshake {
 public:
  enum class State { in_progress, welcome, refused };

  /// REQUIRES: `secret` (empty: none) outlives this object.
  explicit StoreHandshake(std::string_view secret) : secret_(secret) {}

  /// How many bytes the next message still lacks. Read no more than these, and pass them to take().
  std::size_t wanted() const;
  /// Returns the answer to send, which may be empty.
  std::string take(std::string_view bytes);
  State state() const noexcept { return state_; }
  bool has_begun() const noexcept { return server_nonce_.size() > 0 || !input_.empty(); }
  const std::string& refusal() const noexcept { return refusal_; }  // the reason, for the log

 private:
  std::string answer_hello();
  std::string answer_proof();
  std::string refuse(std::string why, std::string answer);

  std::string_view secret_;
  std::string input_, server_nonce_, refusal_;
  State state_ = State::in_progress;
};

/// The client's side, on a fresh connection. True if the server accepts. False if the server closed or reset the
/// connection without a verdict, so that a retry may help. Every error begins with `store` ("store at 127.0.0.1:4000").
/// Throws CommError (silence, no store, another version, an interrupt) and ConfigError (no secret, another secret, a
/// store without one).
bool handshake_with_store(int fd, std::string_view secret, std::chrono::steady_clock::time_point deadline,
                          const std::string& store, const SocketInterrupt* interrupt = nullptr);

}  // namespace phalanx
