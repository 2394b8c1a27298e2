#include "phalanx/store/tcp_store.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/store/store_handshake.h"
#include "phalanx/store/store_proof.h"
#include "phalanx/store/store_table.h"
#include "phalanx/store/tcp_store_wire.h"

namespace phalanx {
namespace {

using store_wire::Operation;
using store_wire::Reader;
using store_wire::Status;
using store_wire::Writer;
using Clock = std::chrono::steady_clock;

// The server answers a wait at its deadline. A client gives up this much later.
constexpr std::chrono::milliseconds kAnswerGrace{5'000};
// Requests that the server answers at once have a shorter timeout than waits: a stopped server must not delay a rank
// that is about to give up.
constexpr std::chrono::milliseconds kPromptAnswer{15'000};

}  // namespace

TcpStore::TcpStore(HostPort server, std::optional<HostPort> reached, TcpStoreOptions options)
    : Store(options.timeout), server_(std::move(server)), reached_(std::move(reached)), options_(std::move(options)) {}

TcpStore::TcpStore(HostPort server, TcpStoreOptions options)
    : TcpStore(std::move(server), std::nullopt, std::move(options)) {
  idle_.push_back(connect(options_.connect_timeout));
  reached_ = peer_address(idle_.back().get()).value_or(server_);
}

TcpStore::~TcpStore() = default;

std::string TcpStore::describe() const { return fmt::format("store at {}", server_.text()); }

std::string TcpStore::derived_key(const std::string& purpose) const {
  // No proof of the handshake begins with this prefix.
  return options_.secret.empty() ? std::string() : hmac_sha256(options_.secret, "phalanx derived key: " + purpose);
}

std::shared_ptr<Store> TcpStore::clone() const {
  TcpStoreOptions options = options_;
  options.timeout = timeout();
  return std::shared_ptr<Store>(new TcpStore(server_, reached_, std::move(options)));  // the constructor is private
}

UniqueFd TcpStore::connect(std::chrono::milliseconds timeout) const {
  // A server with many simultaneous connections may drop one before its handshake.
  constexpr int kAttempts = 5;
  const auto start = Clock::now();
  for (int attempt = 1;; ++attempt) {
    const auto spent = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
    UniqueFd fd = connect_to(reached_.value_or(server_), std::max(timeout - spent, Milliseconds(1)), "the store",
                             {.was_up = reached_.has_value(), .interrupt = &interrupt_});
    const auto deadline = start + std::max(timeout, kAnswerGrace);
    if (handshake_with_store(fd.get(), options_.secret, deadline, describe(), &interrupt_)) return fd;
    if (attempt == kAttempts)
      throw CommError(
          fmt::format("{}: the connection was closed during the greeting: is it a Phalanx store?", describe()));
    std::this_thread::sleep_for(Milliseconds(5 << attempt));
  }
}

std::string TcpStore::ask_on(int fd, const std::string& frame, Milliseconds timeout, const std::string& what) const {
  if (!owner_.is_this_process())  // two processes would mix their requests on one connection
    throw CommError(
        fmt::format("{}: {}: this client belongs to the process that forked this one; expected: a clone() "
                    "of it, or a client that this process has made",
                    describe(), what));
  const auto deadline = Clock::now() + std::min(timeout, Milliseconds(store_wire::kMaxTimeoutMs)) + kAnswerGrace;
  std::string payload;
  // A call that is answered at once never waits, so it checks for the interrupt first.
  IoResult result = interrupt_.is_due() ? IoResult::interrupted : send_all(fd, frame, deadline, &interrupt_);
  if (result == IoResult::done) {
    std::uint32_t length = 0;
    result = receive_all(fd, reinterpret_cast<char*>(&length), sizeof length, deadline, &interrupt_);
    if (result == IoResult::done) {
      if (length == 0 || length > store_wire::kMaxFrame)
        throw CommError(fmt::format("{}: {}: malformed answer of {} bytes", describe(), what, length));
      payload.resize(length);
      result = receive_all(fd, payload.data(), length, deadline, &interrupt_);
    }
  }
  if (result == IoResult::interrupted) throw CommError(store_detail::interrupted_message(describe(), what));
  if (result == IoResult::closed)
    throw StoreConnectionError(
        fmt::format("{}: {}: the connection broke; the process that hosts the store has ended or is "
                    "unreachable",
                    describe(), what));
  if (result == IoResult::late)
    throw CommError(fmt::format("{}: {}: no answer within {} ms; the process that hosts the store is stuck or stopped",
                                describe(), what, timeout.count()));
  return payload;
}

std::string TcpStore::ask(const std::string& frame, Milliseconds timeout, const std::string& what) {
  UniqueFd fd;
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      fd = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!fd) fd = connect(std::min(timeout, options_.connect_timeout));
  std::string payload = ask_on(fd.get(), frame, timeout, what);  // a broken connection is closed with fd
  {
    std::lock_guard lock(mutex_);
    idle_.push_back(std::move(fd));
  }
  Reader reader(payload);
  if (static_cast<Status>(reader.u8()) == Status::error)
    throw StoreRequestError(fmt::format("{}: {}", describe(), reader.value()));
  return payload;
}

TcpStore::Milliseconds TcpStore::prompt() const { return std::min(timeout(), kPromptAnswer); }

void TcpStore::do_set(const std::string& key, const std::string& value) {
  Writer writer;
  writer.u8(static_cast<std::uint8_t>(Operation::set)).string(key).string(value);
  ask(writer.take(), prompt(), fmt::format("set of key '{}'", key));
}

std::optional<std::string> TcpStore::do_try_get(const std::string& key) {
  Writer writer;
  writer.u8(static_cast<std::uint8_t>(Operation::try_get)).string(key);
  const std::string payload = ask(writer.take(), prompt(), fmt::format("get of key '{}'", key));
  Reader reader(std::string_view(payload).substr(1));
  return reader.optional();
}

std::int64_t TcpStore::do_add(const std::string& key, std::int64_t amount) {
  Writer writer;
  writer.u8(static_cast<std::uint8_t>(Operation::add)).string(key).u64(static_cast<std::uint64_t>(amount));
  const std::string payload = ask(writer.take(), prompt(), fmt::format("add to key '{}'", key));
  return static_cast<std::int64_t>(Reader(std::string_view(payload).substr(1)).u64());
}

std::vector<std::string> TcpStore::do_wait(const std::vector<std::string>& keys, WaitFor mode, Milliseconds timeout) {
  const auto operation = mode == WaitFor::values ? Operation::wait_values
                         : mode == WaitFor::all  ? Operation::wait_all
                                                 : Operation::wait_any;
  Writer writer;
  writer.u8(static_cast<std::uint8_t>(operation));
  writer.u64(static_cast<std::uint64_t>(
      std::clamp<std::int64_t>(timeout.count(), 0, static_cast<std::int64_t>(store_wire::kMaxTimeoutMs))));
  writer.u32(static_cast<std::uint32_t>(keys.size()));
  for (const auto& key : keys) writer.string(key);
  const std::string payload =
      ask(writer.take(), timeout,
          keys.size() == 1 ? fmt::format("waiting for key '{}'", keys.front())
                           : fmt::format("waiting for {} keys, '{}' first", keys.size(), keys.front()));
  Reader reader(payload);
  const auto status = static_cast<Status>(reader.u8());
  std::vector<std::string> strings(std::min<std::size_t>(reader.u32(), kMaxKeysPerCall));
  for (auto& string : strings) string = reader.value();
  if (!reader.finished()) throw CommError(fmt::format("{}: malformed answer", describe()));
  if (status == Status::timed_out)
    throw StoreTimeout(store_detail::timeout_message(describe(), timeout, keys.size(), strings, mode == WaitFor::any));
  return strings;
}

std::optional<std::string> TcpStore::do_compare_and_set(const std::string& key,
                                                        const std::optional<std::string>& expected,
                                                        const std::string& desired) {
  Writer writer;
  writer.u8(static_cast<std::uint8_t>(Operation::compare_and_set)).string(key).optional(expected).string(desired);
  const std::string payload = ask(writer.take(), prompt(), fmt::format("compare and set of key '{}'", key));
  return Reader(std::string_view(payload).substr(1)).optional();
}

bool TcpStore::do_delete(const std::string& key) {
  Writer writer;
  writer.u8(static_cast<std::uint8_t>(Operation::erase)).string(key);
  const std::string payload = ask(writer.take(), prompt(), fmt::format("deletion of key '{}'", key));
  return Reader(std::string_view(payload).substr(1)).u8() != 0;
}

void TcpStore::do_set_when_lost(const std::string& key, const std::optional<std::string>& value) {
  std::lock_guard lock(lost_mutex_);
  if (!lost_connection_) lost_connection_ = connect(std::min(prompt(), options_.connect_timeout));
  Writer writer;
  writer.u8(static_cast<std::uint8_t>(Operation::set_when_lost)).string(key).optional(value);
  ask_on(lost_connection_.get(), writer.take(), prompt(), fmt::format("set_when_lost of key '{}'", key));
}

}  // namespace phalanx
