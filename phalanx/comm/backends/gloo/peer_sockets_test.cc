// The connections of messages: every pair of ranks, and nobody else.
#include "phalanx/comm/backends/gloo/peer_sockets.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/store/store_handshake.h"
#include "phalanx/store/store_proof.h"
#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

const std::string kKey = "the key of this group";
constexpr int kWelcome = 0, kHasSecret = 1;

HostPort address_of(const std::string& offer) { return parse_host_port(offer.substr(0, offer.find(' ')), "offer"); }
std::string secret_of(const std::string& offer, const std::string& key = kKey) { return hmac_sha256(key, offer); }
auto soon() { return std::chrono::steady_clock::now() + seconds(20); }

std::string hello(int first, int second) {
  return "PHXSTORE" + std::string{2, 0, static_cast<char>(first), static_cast<char>(second)};
}

// Listeners of `size` ranks, whose connect() the test calls.
struct Ranks {
  explicit Ranks(int size, const std::vector<std::string>& keys = {}) {
    for (int rank = 0; rank < size; ++rank) {
      listeners.push_back(std::make_unique<PeerListener>("127.0.0.1", keys.empty() ? kKey : keys[rank]));
      offers.push_back(listeners.back()->offer());
    }
  }
  std::future<std::vector<PeerSockets>> connect(int rank, milliseconds timeout = seconds(30)) {
    return std::async(std::launch::async, [this, rank, timeout] {
      return listeners[static_cast<std::size_t>(rank)]->connect(rank, offers, timeout, [] {});
    });
  }
  std::vector<std::unique_ptr<PeerListener>> listeners;
  std::vector<std::string> offers;
};

std::string error_of(std::future<std::vector<PeerSockets>> connecting) {
  try {
    connecting.get();
  } catch (const Error& error) {
    return fmt::format("{}: {}", error.kind(), error.what());
  }
  return "no error";
}

void expect_connected(const PeerSockets& sender, const PeerSockets& receiver) {
  const std::string sent = "data";
  ASSERT_EQ(send_all(sender.to.get(), sent, soon()), IoResult::done);
  std::string got(sent.size(), '\0');
  ASSERT_EQ(receive_all(receiver.from.get(), got.data(), got.size(), soon()), IoResult::done);
  EXPECT_EQ(got, sent);
}

void expect_pair(Ranks& ranks, std::future<std::vector<PeerSockets>> first) {
  auto second = ranks.connect(1);
  const auto of_first = first.get(), of_second = second.get();
  expect_connected(of_first[1], of_second[0]);
  expect_connected(of_second[0], of_first[1]);
}

bool is_closed_by_peer(int fd) {
  for (char bytes[256];;) {
    pollfd poll_fd{fd, POLLIN, 0};
    if (poll(&poll_fd, 1, 20'000) != 1) return false;
    if (recv(fd, bytes, sizeof bytes, 0) <= 0) return true;
  }
}

TEST(PeerSockets, EveryPairIsConnectedBothWays) {
  constexpr int kSize = 5;
  Ranks ranks(kSize);
  std::vector<std::future<std::vector<PeerSockets>>> connecting;
  for (int rank = 0; rank < kSize; ++rank) connecting.push_back(ranks.connect(rank));
  std::vector<std::vector<PeerSockets>> peers;
  for (auto& one : connecting) peers.push_back(one.get());
  for (std::size_t a = 0; a < kSize; ++a)
    for (std::size_t b = 0; b < kSize; ++b)
      if (a != b) expect_connected(peers[a][b], peers[b][a]);
}

// Five ranks in this process need 40 descriptors for their connections alone.
TEST(PeerSockets, TheDescriptorLimitIsRaised) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto in_use = std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  const rlimit low{.rlim_cur = static_cast<rlim_t>(in_use) + 20, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  Ranks ranks(5);
  std::vector<std::future<std::vector<PeerSockets>>> connecting;
  for (int rank = 0; rank < 5; ++rank) connecting.push_back(ranks.connect(rank));
  for (auto& one : connecting) EXPECT_NO_THROW(one.get());
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST(PeerSockets, NobodyListensAfterwards) {
  Ranks ranks(2);
  expect_pair(ranks, ranks.connect(0));
  for (const std::string& offer : ranks.offers)
    EXPECT_THROW(connect_to(address_of(offer), milliseconds(1), "the rank"), CommError);
}

TEST(PeerSockets, ListensOnlyAtTheGivenAddress) {
  const Ranks ranks(1);
  EXPECT_EQ(address_of(ranks.offers[0]).host, "127.0.0.1");
  EXPECT_THROW(connect_to({"127.0.0.2", address_of(ranks.offers[0]).port}, milliseconds(1), "the rank"), CommError);
}

TEST(PeerSockets, StrangersAreRefusedAndHinderNobody) {
  Ranks ranks(2);
  auto first = ranks.connect(0);
  const HostPort address = address_of(ranks.offers[0]);
  for (const std::string& message :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100'000, 'x'), hello(0, 0), hello(kHasSecret, 7),
        hello(9, 0), "PHXSTORE" + std::string{9, 0, 1, 0}, hello(kHasSecret, 0) + std::string(64, 'x')}) {
    const UniqueFd stranger = connect_to(address, seconds(5), "the rank");
    send(stranger.get(), message.data(), message.size(), MSG_NOSIGNAL);
    EXPECT_TRUE(is_closed_by_peer(stranger.get())) << message.substr(0, 40);
  }
  // These are left open, or closed in the middle of the greeting.
  const UniqueFd silent = connect_to(address, seconds(5), "the rank");
  const UniqueFd half = connect_to(address, seconds(5), "the rank");
  EXPECT_EQ(send_all(half.get(), hello(kHasSecret, 0).substr(0, 5), soon()), IoResult::done);
  UniqueFd gone = connect_to(address, seconds(5), "the rank");
  EXPECT_EQ(send_all(gone.get(), hello(kHasSecret, 0), soon()), IoResult::done);
  gone.reset();
  expect_pair(ranks, std::move(first));
  EXPECT_TRUE(is_closed_by_peer(silent.get()));
  EXPECT_TRUE(is_closed_by_peer(half.get()));
}

// However many come, and however fast.
TEST(PeerSockets, AStreamOfStrangersDoesNotPutOffTheTimeOut) {
  Ranks ranks(2);
  auto first = ranks.connect(0, milliseconds(300));
  std::atomic<bool> is_over{false};
  std::thread stream([&, address = address_of(ranks.offers[0])] {
    std::vector<UniqueFd> strangers;
    while (!is_over) {
      try {
        strangers.push_back(begin_connect(address));
      } catch (const CommError&) {  // it listens no longer
      }
      if (strangers.size() > 100) strangers.clear();
    }
  });
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(error_of(std::move(first)), HasSubstr("have not connected to rank 0 at 127.0.0.1:"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(20));
  is_over = true;
  stream.join();
}

// Who knows the key of the job but not the token of this listener is refused, too: the token is part of the secret.
TEST(PeerSockets, TheSecretBelongsToOneListener) {
  Ranks ranks(2);
  auto first = ranks.connect(0);
  const UniqueFd stranger = connect_to(address_of(ranks.offers[0]), seconds(5), "the rank");
  EXPECT_THROW(handshake_with_store(stranger.get(), secret_of(ranks.offers[1]), soon(), "rank 0"), ConfigError);
  expect_pair(ranks, std::move(first));
}

TEST(PeerSockets, ARankThatIsNoneIsRefused) {
  Ranks ranks(2);
  auto first = ranks.connect(0);
  for (const std::uint32_t rank : {0U, 2U, 0xffffffffU}) {
    const UniqueFd stranger = connect_to(address_of(ranks.offers[0]), seconds(5), "the rank");
    ASSERT_TRUE(handshake_with_store(stranger.get(), secret_of(ranks.offers[0]), soon(), "rank 0"));
    EXPECT_EQ(send_all(stranger.get(), {reinterpret_cast<const char*>(&rank), sizeof rank}, soon()), IoResult::done);
    EXPECT_TRUE(is_closed_by_peer(stranger.get())) << rank;
  }
  expect_pair(ranks, std::move(first));
}

// Each refuses the other. Who hears of it second finds that the first listens no longer.
TEST(PeerSockets, ARankOfAnotherJobIsAnErrorOnBoth) {
  Ranks ranks(2, {kKey, "the key of another group"});
  auto first = ranks.connect(0), second = ranks.connect(1);
  const auto is_refused =
      AnyOf(HasSubstr("what listens there is not that rank of this job"), HasSubstr("it has closed the connection"));
  EXPECT_THAT(error_of(std::move(first)), AllOf(HasSubstr("rank 1 at 127.0.0.1:"), is_refused));
  EXPECT_THAT(error_of(std::move(second)), AllOf(HasSubstr("rank 0 at 127.0.0.1:"), is_refused));
}

// What rank 1's address leads to: answers the first bytes with `answer` and, if so told, closes.
std::string error_with_server(const std::string& answer, bool closes, milliseconds timeout = seconds(30)) {
  Ranks ranks(2);
  const UniqueFd listener = listen_on({"127.0.0.1", 0});
  ranks.offers[1] = local_address(listener.get()).text() + " token";
  auto first = ranks.connect(0, timeout);
  std::vector<UniqueFd> accepted;
  while (first.wait_for(seconds(0)) != std::future_status::ready) {
    pollfd poll_fd{listener.get(), POLLIN, 0};
    if (poll(&poll_fd, 1, 20) != 1) continue;
    UniqueFd fd(accept(listener.get(), nullptr, nullptr));
    char byte;
    recv(fd.get(), &byte, 1, 0);
    send(fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    if (!closes) accepted.push_back(std::move(fd));
  }
  return error_of(std::move(first));
}

TEST(PeerSockets, FalseServersAreErrorsThatNameTheRank) {
  const std::string proof = hello(kWelcome, kHasSecret) + std::string(kNonceBytes, 'n') + std::string(1, '\0');
  EXPECT_THAT(error_with_server("HTTP/1.1 400 Bad Request\r\n\r\n", false),
              AllOf(HasSubstr("CommError: rank 1 at 127.0.0.1:"), HasSubstr("is not a Phalanx store")));
  EXPECT_THAT(error_with_server(hello(kWelcome, 0), false), HasSubstr("is not that rank of this job"));
  EXPECT_THAT(error_with_server(proof + std::string(kProofBytes, 'p'), false), HasSubstr("is not that rank"));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(error_with_server(hello(kWelcome, kHasSecret), true),
              AllOf(HasSubstr("cannot connect to rank 1 at 127.0.0.1:"), HasSubstr("it has closed the connection")));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(150)) << "it pauses between its attempts";
}

TEST(PeerSockets, ARefusedConnectionIsAnErrorWithItsReason) {
  Ranks ranks(2);
  ranks.listeners[1].reset();
  EXPECT_THAT(error_of(ranks.connect(0)), AllOf(HasSubstr("rank 1 at 127.0.0.1:"), HasSubstr("Connection refused")));
}

// Half-open: the connection stands, and nothing comes.
TEST(PeerSockets, SilentPeersAreNamedAtTheTimeOut) {
  const std::string expected = "have not connected to rank 0 at 127.0.0.1:";
  EXPECT_THAT(error_with_server("", false, milliseconds(200)), AllOf(HasSubstr(expected), HasSubstr("0.2 s: 1")));
  EXPECT_THAT(error_with_server(hello(kWelcome, kHasSecret).substr(0, 7), false, milliseconds(200)),
              HasSubstr(expected));
}

TEST(PeerSockets, TheCallersCheckEndsTheWait) {
  Ranks ranks(2);
  EXPECT_THROW(ranks.listeners[0]->connect(0, ranks.offers, seconds(30), [] { throw CommError("rank 1 has died"); }),
               CommError);
}

}  // namespace
}  // namespace phalanx
