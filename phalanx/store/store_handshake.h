// How a connection begins, on both sides. First the versions; then, if the server has a secret, each side proves to the
// other that it knows it (tcp_store_wire.h has the bytes). The store's connections begin so, and those of messages
// between ranks (comm/backends/gloo).
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace phalanx {

class SocketInterrupt;

// Neither side does I/O: the caller sends what the calls return, reads wanted() bytes and passes them to take().

/// The server's side. It never needs more than 76 bytes from an unauthenticated client.
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
  bool has_begun() const noexcept { return !server_nonce_.empty() || !input_.empty(); }
  const std::string& refusal() const noexcept { return refusal_; }  // the reason, for the log

 private:
  std::string answer_hello();
  std::string answer_proof();
  std::string refuse(std::string why, std::string answer);

  std::string_view secret_;
  std::string input_, server_nonce_, refusal_;
  State state_ = State::in_progress;
};

/// The client's side. Every error begins with `server` ("store at 127.0.0.1:4000"). take() throws CommError (no store,
/// another version) and ConfigError (no secret, another secret, a server without one).
class ClientHandshake {
 public:
  /// REQUIRES: `secret` (empty: none) outlives this object.
  ClientHandshake(std::string_view secret, std::string server) : secret_(secret), server_(std::move(server)) {}

  std::string begin() const;  // the first message
  /// How many bytes the next message still lacks; 0 once the server has accepted.
  std::size_t wanted() const;
  std::string take(std::string_view bytes);

 private:
  enum class Awaits { hello, nonce, proof, nothing };
  void require_welcome() const;
  std::string answer_nonce();
  void require_proof() const;

  std::string_view secret_;
  std::string server_, input_, server_nonce_, client_nonce_;
  Awaits awaits_ = Awaits::hello;
};

/// Runs the client's side on a fresh connection. True if the server accepts. False if the server closed or reset the
/// connection without a verdict, so that a retry may help. Throws what ClientHandshake throws, and CommError on silence
/// or an interrupt.
bool handshake_with_store(int fd, std::string_view secret, std::chrono::steady_clock::time_point deadline,
                          const std::string& store, const SocketInterrupt* interrupt = nullptr);

}  // namespace phalanx
