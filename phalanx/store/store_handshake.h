// How a connection to the store begins, on both sides: versions, then, where the store has a secret, each side proves
// to the other that it knows it (the bytes stand in tcp_store_wire.h). Used by the store's server and client only.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx {

class SocketInterrupt;

/// The server's side, without any I/O: it is given bytes as they come and says what to answer. It never wants more than
/// 76 bytes of a stranger.
class StoreHandshake {
 public:
  enum class State { in_progress, welcome, refused };

  /// The secret, empty for none, is to outlive this.
  explicit StoreHandshake(std::string_view secret) : secret_(secret) {}

  /// How many bytes the next message still lacks; no more than these are to be read and given to take().
  std::size_t wanted() const;
  /// Returns the answer to be sent, which may be empty.
  std::string take(std::string_view bytes);
  State state() const noexcept { return state_; }
  bool has_begun() const noexcept { return server_nonce_.size() > 0 || !input_.empty(); }
  const std::string& refusal() const noexcept { return refusal_; }  // why, for the log

 private:
  std::string answer_hello();
  std::string answer_proof();
  std::string refuse(std::string why, std::string answer);

  std::string_view secret_;
  std::string input_, server_nonce_, refusal_;
  State state_ = State::in_progress;
};

/// The client's side, on a fresh connection. True when welcome; false when the server hung up or reset it without a
/// verdict, so that trying again may help. `store` ("store at 127.0.0.1:4000") begins every error. Throws CommError
/// (silence, no store, another version, an interrupt) and ConfigError (no secret, another secret, a store without one).
bool handshake_with_store(int fd, std::string_view secret, std::chrono::steady_clock::time_point deadline,
                          const std::string& store, const SocketInterrupt* interrupt = nullptr);

}  // namespace phalanx
