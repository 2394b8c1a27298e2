// TcpStore: a Store shared by processes. One process hosts the server. All processes (that one too) connect as clients.
//
// Contract
// - The server listens on loopback unless told otherwise. If port is 0 the system chooses the port. One thread serves.
//   The destructor ends the server; clients then get a CommError.
// - With a secret (job_secret.h) server and client prove to each other, on every connection, that they know it. Nothing
//   is encrypted.
// - A client that does not know the secret is refused. So is a connection that sends nothing, or anything but the
//   protocol. The server logs the address and the reason, at most ten a minute; other clients are not affected. Such a
//   connection costs the server at most 76 bytes, one of max_unauthenticated entries and hello_timeout.
// - A client that is refused for its secret, or finds a store without one, gets a ConfigError that says so.
// - A client connects in its constructor. It waits up to its connect timeout for a server that is not up yet.
// - A client uses one connection per call in progress, so a blocked get() on one thread delays no other thread. A
//   connection that breaks is a CommError that names the server's address and the request.
// - Only the first connection resolves the server's name and waits for the server. Later connections, and those of
//   clones, use the resolved address. If the server refuses them, it has ended.
// - A client whose process dies loses its connections. The server then sets its set_when_lost keys. A forked child that
//   lives on holds the connections, too.
// - A client belongs to the process that made it.
//   In a forked child its requests are CommErrors, and clone() is allowed.
//
//   TcpStoreServer server;                                        // 127.0.0.1, any port
//   auto store = std::make_shared<TcpStore>(server.address());    // in any process
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/base/owner_process.h"
#include "phalanx/store/store.h"
#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

struct TcpStoreServerOptions {
  std::string host = "127.0.0.1";                      // "*": every interface
  std::uint16_t port = 0;                              // 0: any free port
  std::string secret;                                  // empty: every client that reaches the port is accepted
  std::chrono::milliseconds hello_timeout{10'000};     // a connection without a complete handshake by then is dropped
  std::size_t max_unauthenticated = 1024;              // connections still in their handshake; the oldest goes first
  std::function<void(const std::string&)> on_refusal;  // on the server's thread; default: log::warn
};

class TcpStoreServer {
 public:
  explicit TcpStoreServer(TcpStoreServerOptions options = {});
  ~TcpStoreServer();  // in a forked child it leaves the parent's server running
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  HostPort address() const;  // the host as given in the options ("*": 127.0.0.1), the real port

 private:
  class Impl;
  OwnerProcess owner_;
  std::unique_ptr<Impl> impl_;
};

struct TcpStoreOptions {
  std::chrono::milliseconds timeout{300'000};          // of every call without a timeout argument
  std::chrono::milliseconds connect_timeout{300'000};  // for the server to start
  std::string secret;                                  // the server's; empty: none
};

class TcpStore final : public Store {
 public:
  explicit TcpStore(HostPort server, TcpStoreOptions options = {});
  ~TcpStore() override;
  std::string describe() const override;
  std::string derived_key(const std::string& purpose) const override;
  std::shared_ptr<Store> clone() const override;
  const HostPort& server() const noexcept { return server_; }

 private:
  TcpStore(HostPort server, std::optional<HostPort> reached, TcpStoreOptions options);  // does not connect

  void do_set(const std::string& key, const std::string& value) override;
  std::optional<std::string> do_try_get(const std::string& key) override;
  std::int64_t do_add(const std::string& key, std::int64_t amount) override;
  std::vector<std::string> do_wait(const std::vector<std::string>& keys, WaitFor mode, Milliseconds timeout) override;
  std::optional<std::string> do_compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                                                const std::string& desired) override;
  bool do_delete(const std::string& key) override;
  void do_set_when_lost(const std::string& key, const std::optional<std::string>& value) override;
  void do_interrupt(std::chrono::steady_clock::time_point at) noexcept override { interrupt_.at(at); }

  Milliseconds prompt() const;  // the timeout of calls that return at once
  UniqueFd connect(std::chrono::milliseconds timeout) const;
  // Sends a frame and returns the answer's payload. `what` names the request ("get of key 'a'").
  std::string ask(const std::string& frame, Milliseconds timeout, const std::string& what);
  std::string ask_on(int fd, const std::string& frame, Milliseconds timeout, const std::string& what) const;

  OwnerProcess owner_;
  HostPort server_;
  std::optional<HostPort> reached_;  // the numeric address, once a connection has been made
  TcpStoreOptions options_;
  SocketInterrupt interrupt_;
  std::mutex mutex_;
  std::vector<UniqueFd> idle_;  // connections with no call in progress
  std::mutex lost_mutex_;
  UniqueFd lost_connection_;  // carries the set_when_lost keys and nothing else
};

}  // namespace phalanx
