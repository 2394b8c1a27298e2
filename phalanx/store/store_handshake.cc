#include "phalanx/store/store_handshake.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/store/store_proof.h"
#include "phalanx/store/store_table.h"
#include "phalanx/store/tcp_store_socket.h"
#include "phalanx/store/tcp_store_wire.h"

namespace phalanx {
namespace {

namespace wire = store_wire;
using wire::Verdict;

std::string hello_message(std::uint8_t first, std::uint8_t second) {
  std::string message(wire::kMagic);
  message.append(reinterpret_cast<const char*>(&wire::kVersion), 2);
  message.push_back(static_cast<char>(first));
  message.push_back(static_cast<char>(second));
  return message;
}

struct Hello {
  std::uint16_t version = 0;
  std::uint8_t first = 0, second = 0;
};

Hello parse_hello(std::string_view message) {
  Hello hello;
  std::memcpy(&hello.version, message.data() + 8, 2);
  hello.first = static_cast<std::uint8_t>(message[10]);
  hello.second = static_cast<std::uint8_t>(message[11]);
  return hello;
}

}  // namespace

std::size_t StoreHandshake::wanted() const {
  const std::size_t message = server_nonce_.empty() ? wire::kHelloBytes : kNonceBytes + kProofBytes;
  return message - input_.size();
}

std::string StoreHandshake::take(std::string_view bytes) {
  input_ += bytes;
  const std::size_t compared = std::min(input_.size(), wire::kMagic.size());
  if (server_nonce_.empty() && std::memcmp(input_.data(), wire::kMagic.data(), compared) != 0)
    return refuse("it does not speak the store's protocol", "");
  if (wanted() > 0) return "";
  return server_nonce_.empty() ? answer_hello() : answer_proof();
}

std::string StoreHandshake::refuse(std::string why, std::string answer) {
  state_ = State::refused;
  refusal_ = std::move(why);
  return answer;
}

std::string StoreHandshake::answer_hello() {
  const Hello hello = parse_hello(input_);
  input_.clear();
  const std::uint8_t authentication = secret_.empty() ? 0 : 1;
  const auto answer = [&](Verdict verdict) {
    return hello_message(static_cast<std::uint8_t>(verdict), authentication);
  };
  if (hello.version != wire::kVersion || hello.second != 0)
    return refuse(
        fmt::format("it speaks version {} of the store's protocol, this store {}", hello.version, wire::kVersion),
        answer(Verdict::other_version));
  if (hello.first > 1) return refuse("it does not speak the store's protocol", "");
  if (secret_.empty() && hello.first == 1)
    return refuse("it has a job secret, and this store was started without", answer(Verdict::no_secret_here));
  if (!secret_.empty() && hello.first == 0) return refuse("it has no job secret", answer(Verdict::secret_needed));
  if (secret_.empty()) {
    state_ = State::welcome;
    return answer(Verdict::welcome);
  }
  server_nonce_ = random_bytes(kNonceBytes);
  return answer(Verdict::welcome) + server_nonce_;
}

std::string StoreHandshake::answer_proof() {
  const std::string_view client_nonce = std::string_view(input_).substr(0, kNonceBytes);
  const std::string_view proof = std::string_view(input_).substr(kNonceBytes);
  std::string answer;
  // A client without a valid proof gets no proof either: it could use one to guess the secret offline.
  if (!equal_secrets(proof, store_proof(secret_, ProofOf::client, client_nonce, server_nonce_))) {
    answer.push_back(static_cast<char>(Verdict::wrong_secret));
    answer.append(kProofBytes, '\0');
    return refuse("its job secret is another one", std::move(answer));
  }
  answer.push_back(static_cast<char>(Verdict::welcome));
  answer += store_proof(secret_, ProofOf::server, client_nonce, server_nonce_);
  state_ = State::welcome;
  return answer;
}

std::string ClientHandshake::begin() const { return hello_message(secret_.empty() ? 0 : 1, 0); }

std::size_t ClientHandshake::wanted() const {
  constexpr std::size_t kSizes[] = {wire::kHelloBytes, kNonceBytes, 1 + kProofBytes, 0};
  return kSizes[static_cast<std::size_t>(awaits_)] - input_.size();
}

std::string ClientHandshake::take(std::string_view bytes) {
  input_ += bytes;
  if (wanted() > 0) return "";
  std::string answer;
  switch (awaits_) {
    case Awaits::hello:
      require_welcome();
      awaits_ = secret_.empty() ? Awaits::nothing : Awaits::nonce;
      break;
    case Awaits::nonce:
      answer = answer_nonce();
      awaits_ = Awaits::proof;
      break;
    case Awaits::proof:
      require_proof();
      awaits_ = Awaits::nothing;
      break;
    case Awaits::nothing:
      break;
  }
  input_.clear();
  return answer;
}

void ClientHandshake::require_welcome() const {
  if (std::memcmp(input_.data(), wire::kMagic.data(), wire::kMagic.size()) != 0)
    throw CommError(fmt::format("{}: what listens there is not a Phalanx store", server_));
  const Hello hello = parse_hello(input_);
  const auto verdict = static_cast<Verdict>(hello.first);
  const std::uint8_t has_secret = secret_.empty() ? 0 : 1;
  if (verdict == Verdict::other_version || hello.version != wire::kVersion)
    throw CommError(
        fmt::format("{}: it speaks protocol version {}, this program {}: run the same Phalanx on every node", server_,
                    hello.version, wire::kVersion));
  if (verdict == Verdict::secret_needed)
    throw ConfigError(
        fmt::format("{}: it asks for the job's secret, and this process has none: set PHALANX_JOB_SECRET, or "
                    "PHALANX_JOB_SECRET_FILE, to the same on every node",
                    server_));
  // A store that does not ask for the secret could be anyone's: this job's data must not go there.
  if (verdict == Verdict::no_secret_here || (has_secret == 1 && hello.second == 0))
    throw ConfigError(
        fmt::format("{}: this process has a job secret and the store was started without: set PHALANX_JOB_SECRET, "
                    "or PHALANX_JOB_SECRET_FILE, to the same for whoever hosts the store, or nowhere",
                    server_));
  if (verdict != Verdict::welcome || hello.second != has_secret)
    throw CommError(fmt::format("{}: it answers the greeting with {} {}, which this program does not know", server_,
                                hello.first, hello.second));
}

std::string ClientHandshake::answer_nonce() {
  server_nonce_ = input_;
  client_nonce_ = random_bytes(kNonceBytes);
  return client_nonce_ + store_proof(secret_, ProofOf::client, client_nonce_, server_nonce_);
}

void ClientHandshake::require_proof() const {
  const auto verdict = static_cast<Verdict>(input_[0]);
  if (verdict == Verdict::wrong_secret)
    throw ConfigError(
        fmt::format("{}: the job secret of this process is not the store's: another job's store listens there, or "
                    "PHALANX_JOB_SECRET differs between the nodes",
                    server_));
  if (verdict != Verdict::welcome ||
      !equal_secrets(std::string_view(input_).substr(1),
                     store_proof(secret_, ProofOf::server, client_nonce_, server_nonce_)))
    throw ConfigError(
        fmt::format("{}: what listens there does not know this job's secret: it is not this job's store", server_));
}

bool handshake_with_store(int fd, std::string_view secret, std::chrono::steady_clock::time_point deadline,
                          const std::string& store, const SocketInterrupt* interrupt) {
  ClientHandshake handshake(secret, store);
  std::string message = handshake.begin();
  while (handshake.wanted() > 0) {
    std::string answer(handshake.wanted(), '\0');
    IoResult result = send_all(fd, message, deadline, interrupt);
    if (result == IoResult::done) result = receive_all(fd, answer.data(), answer.size(), deadline, interrupt);
    if (result == IoResult::interrupted) throw CommError(store_detail::interrupted_message(store, "the greeting"));
    if (result == IoResult::late)
      throw CommError(fmt::format("{}: the connection was silent during the greeting: is it a Phalanx store?", store));
    if (result != IoResult::done) return false;
    message = handshake.take(answer);
  }
  return true;
}

}  // namespace phalanx
