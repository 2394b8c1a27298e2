// Messages over connected sockets: order, data, mismatches, hostile and silent peers, threads, leaving and giving up.
#include "phalanx/comm/backends/gloo/message_transport.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <new>
#include <numeric>

#include "phalanx/base/error.h"
#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

std::pair<UniqueFd, UniqueFd> connected_pair() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) throw CommError("socketpair");
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// Sleeps until a condition holds that some transport's on_change() may have made true.
class Changes {
 public:
  std::function<void()> teller() {
    return [this] {
      const std::lock_guard lock(mutex_);
      changed_.notify_all();
    };
  }
  bool await(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, seconds(60), condition);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

std::vector<PeerSockets> sockets_of(int rank, UniqueFd to, UniqueFd from) {
  std::vector<PeerSockets> peers(2);
  peers[static_cast<std::size_t>(1 - rank)] = {std::move(to), std::move(from)};
  return peers;
}

class TwoTransports : public testing::Test {
 protected:
  void SetUp() override {
    auto [to, at_peer] = connected_pair();
    auto [from, of_peer] = connected_pair();
    ranks_[0] = std::make_unique<MessageTransport>(0, sockets_of(0, std::move(to), std::move(from)), changes_.teller());
    ranks_[1] =
        std::make_unique<MessageTransport>(1, sockets_of(1, std::move(of_peer), std::move(at_peer)), changes_.teller());
  }
  std::shared_ptr<Message> send(int rank, std::vector<int>& data, int tag = 0) { return post(rank, true, data, tag); }
  std::shared_ptr<Message> receive(int rank, std::vector<int>& data, int tag = 0) {
    return post(rank, false, data, tag);
  }
  std::string outcome(const std::shared_ptr<Message>& message) {
    if (!changes_.await([&] { return message->is_done(); })) return "not done";
    return message->mismatch() + message->error();
  }
  void leave(int rank) { ranks_[rank].reset(); }

  Changes changes_;
  std::unique_ptr<MessageTransport> ranks_[2];

 private:
  std::shared_ptr<Message> post(int rank, bool is_send, std::vector<int>& data, int tag) {
    return ranks_[rank]->post({.is_send = is_send,
                               .data = data.data(),
                               .count = static_cast<std::int64_t>(data.size()),
                               .dtype = DataType::i32,
                               .peer = 1 - rank,
                               .tag = tag});
  }
};

TEST_F(TwoTransports, MessagesMatchByTagThenByOrder) {
  std::vector<int> a{1}, b{2, 2}, c{3}, nothing, got_a(1), got_b(2), got_c(1), got_nothing;
  const auto late = receive(1, got_c, 7);
  std::vector<std::shared_ptr<Message>> all{send(0, b, 5), send(0, a, 7), send(0, nothing, 9), send(0, c, 7)};
  all.insert(all.end(), {receive(1, got_a, 7), receive(1, got_nothing, 9), receive(1, got_b, 5), late});
  for (const auto& message : all) EXPECT_EQ(outcome(message), "");
  EXPECT_EQ(got_c, a);  // posted first
  EXPECT_EQ(got_a, c);
  EXPECT_EQ(got_b, b);
}

TEST_F(TwoTransports, ASendEndsOnlyWhenItsReceiveIsPosted) {
  std::vector<int> data{1}, got(1), other{2}, got_other(1);
  const auto sent = send(0, data), other_sent = send(0, other, 1);
  EXPECT_EQ(outcome(receive(1, got_other, 1)), "");
  EXPECT_EQ(outcome(other_sent), "");
  EXPECT_FALSE(sent->is_done());
  EXPECT_EQ(outcome(receive(1, got)), "");
  EXPECT_EQ(outcome(sent), "");
}

TEST_F(TwoTransports, LargeMessagesCrossInBothDirections) {
  std::vector<int> up(5'000'011), down(7'000'003), got_up(up.size()), got_down(down.size());
  std::iota(up.begin(), up.end(), 1);
  std::iota(down.begin(), down.end(), -3);
  for (const auto& message : {send(0, up), receive(0, got_down), send(1, down), receive(1, got_up)})
    EXPECT_EQ(outcome(message), "");
  EXPECT_TRUE(got_up == up);
  EXPECT_TRUE(got_down == down);
}

TEST_F(TwoTransports, MessagesOfCollectivesAreNotRequested) {
  std::vector<int> data{1, 2, 3}, more{4}, got(3), got_more(1);
  const auto sent = send(0, data, kCollectiveTag), sent_more = send(0, more, kCollectiveTag);
  EXPECT_EQ(outcome(sent) + outcome(sent_more), "");
  EXPECT_EQ(outcome(receive(1, got, kCollectiveTag)), "");
  const auto received_more = receive(1, got_more, kCollectiveTag);
  EXPECT_EQ(outcome(received_more), "");
  EXPECT_EQ(got, data);
  EXPECT_EQ(got_more, more);
}

// The receiver has no memory for them yet, so they stay where they are; then those behind them come, too.
TEST_F(TwoTransports, MessagesOfCollectivesWaitForTheirReceives) {
  std::vector<int> large(5'000'003), small{7}, other{8}, got_large(large.size()), got_small(1), got_other(1);
  std::iota(large.begin(), large.end(), 5);
  const auto received_other = receive(1, got_other, 3);
  std::vector<std::shared_ptr<Message>> all{send(0, small, kCollectiveTag), send(0, large, kCollectiveTag),
                                            send(0, small, kCollectiveTag), send(0, other, 3)};
  EXPECT_EQ(outcome(all[0]), "");
  EXPECT_FALSE(all[1]->is_done());
  EXPECT_EQ(outcome(receive(1, got_small, kCollectiveTag)), "");
  EXPECT_FALSE(received_other->is_done());
  EXPECT_EQ(outcome(receive(1, got_large, kCollectiveTag)), "");
  EXPECT_TRUE(got_large == large);
  got_small[0] = 0;
  EXPECT_EQ(outcome(receive(1, got_small, kCollectiveTag)), "");
  EXPECT_EQ(got_small, small);
  EXPECT_EQ(outcome(received_other), "");
  EXPECT_EQ(got_other, other);
  for (const auto& message : all) EXPECT_EQ(outcome(message), "");
}

TEST_F(TwoTransports, MessagesOfCollectivesThatDifferAreAMismatch) {
  std::vector<int> data(5), got(6);
  const auto sent = send(0, data, kCollectiveTag);
  EXPECT_THAT(outcome(receive(1, got, kCollectiveTag)), HasSubstr("rank 0 sends int32[5]"));
  EXPECT_EQ(got, std::vector<int>(6));
  EXPECT_EQ(outcome(sent), "");
}

// Small messages between large ones: what is read ahead belongs to the next message.
TEST_F(TwoTransports, SizesMayAlternate) {
  const std::vector<std::size_t> sizes{1, 300'000, 3, 0, 16'384, 16'380, 1'000'000, 2};
  std::vector<std::vector<int>> sent, got;
  std::vector<std::shared_ptr<Message>> all;
  for (const std::size_t size : sizes) {
    sent.emplace_back(size, static_cast<int>(size) + 1);
    got.emplace_back(size);
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) all.push_back(receive(1, got[i]));
  for (std::size_t i = 0; i < sizes.size(); ++i) all.push_back(send(0, sent[i]));
  for (const auto& message : all) EXPECT_EQ(outcome(message), "");
  EXPECT_TRUE(got == sent);
}

TEST_F(TwoTransports, AMismatchIsTheSameErrorAtBothEnds) {
  std::vector<int> data(5), got(6), next{8}, got_next(1);
  const auto sent = send(0, data, 3), received = receive(1, got, 3);
  EXPECT_EQ(outcome(sent), "rank 0 sends int32[5] under tag 3 and rank 1 receives int32[6]");
  EXPECT_EQ(outcome(received), outcome(sent));
  EXPECT_EQ(got, std::vector<int>(6));
  const auto sent_next = send(0, next), received_next = receive(1, got_next);
  EXPECT_EQ(outcome(received_next), "");
  EXPECT_EQ(outcome(sent_next), "");  // its memory is used until then
  EXPECT_EQ(got_next, next);
}

TEST_F(TwoTransports, WhatWasSentArrivesAfterTheSenderHasLeft) {
  std::vector<int> data{4, 2}, got(2), never(1);
  const auto received = receive(1, got);
  EXPECT_EQ(outcome(send(0, data)), "");
  leave(0);
  EXPECT_EQ(outcome(received), "");
  EXPECT_EQ(got, data);
  EXPECT_THAT(outcome(receive(1, never)), HasSubstr("rank 0"));
  EXPECT_THAT(outcome(send(1, never)), HasSubstr("rank 0"));
  EXPECT_EQ(ranks_[1]->gave_up_before(1'000'000), -1);
}

TEST_F(TwoTransports, GivingUpEndsTheMessagesOfBothAndIsTold) {
  std::vector<int> data(10'000'000), got(10'000'000), never(1), unmet(1);
  const auto received = receive(1, got), sent = send(0, data), waiting = receive(0, never), unsent = send(1, unmet, 8);
  ranks_[0]->abort(3);
  EXPECT_TRUE(sent->is_done() && waiting->is_done());
  EXPECT_EQ(waiting->error(), "this rank has given up the group");
  EXPECT_THAT(outcome(received), HasSubstr("rank 0"));
  EXPECT_THAT(outcome(unsent), HasSubstr("rank 0"));
  EXPECT_TRUE(changes_.await([&] { return ranks_[1]->gave_up_before(3) == 0; }));
  EXPECT_EQ(ranks_[1]->gave_up_before(2), -1);
  EXPECT_NE(outcome(send(0, data)), "");
}

auto threads_here() { return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}); }

TEST_F(TwoTransports, OutstandingMessagesHaveNoThreads) {
  const auto before = threads_here();
  std::vector<std::vector<int>> data(200, std::vector<int>(1'000)), got = data;
  std::vector<std::shared_ptr<Message>> all;
  for (int i = 0; i < 100; ++i) all.push_back(receive(0, got[static_cast<std::size_t>(i)], i));
  for (int i = 100; i < 200; ++i) all.push_back(send(0, data[static_cast<std::size_t>(i)], i));
  EXPECT_EQ(threads_here(), before);
  for (int i = 0; i < 100; ++i) all.push_back(send(1, data[static_cast<std::size_t>(i)], i));
  for (int i = 100; i < 200; ++i) all.push_back(receive(1, got[static_cast<std::size_t>(i)], i));
  for (const auto& message : all) EXPECT_EQ(outcome(message), "");
}

// A transport whose peer is this test.
class HostilePeer : public testing::Test {
 protected:
  HostilePeer() {
    UniqueFd to, from;
    std::tie(to, at_requests_) = connected_pair();
    std::tie(from, at_data_) = connected_pair();
    transport_ =
        std::make_unique<MessageTransport>(0, sockets_of(0, std::move(to), std::move(from)), changes_.teller());
  }
  std::shared_ptr<Message> post(bool is_send, void* data, std::int64_t count) {
    return transport_->post({.is_send = is_send, .data = data, .count = count, .dtype = DataType::u8, .peer = 1});
  }
  static void write(const UniqueFd& fd, const MessageFrame& frame, std::size_t bytes = sizeof(MessageFrame)) {
    ASSERT_EQ(::send(fd.get(), &frame, bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
  }
  std::string outcome(const std::shared_ptr<Message>& message) {
    return changes_.await([&] { return message->is_done(); }) ? message->mismatch() + message->error() : "not done";
  }

  Changes changes_;
  UniqueFd at_requests_, at_data_;  // what the transport's `to` and `from` lead to
  std::unique_ptr<MessageTransport> transport_;
};

TEST_F(HostilePeer, AMessageThatWasNotRequestedIsAnError) {
  char byte = 0;
  const auto received = post(false, &byte, 1);
  write(at_data_, {.count = 1, .tag = 77});
  EXPECT_EQ(outcome(received), "rank 1 sends a message that this rank has not requested");
}

TEST_F(HostilePeer, AMalformedFrameIsAnError) {
  char byte = 0;
  const auto received = post(false, &byte, 1), sent = post(true, &byte, 1);
  write(at_data_, {.count = -1});
  write(at_requests_, {.count = 1, .dtype = static_cast<DataType>(99)});
  EXPECT_NE(outcome(received), "");
  EXPECT_EQ(outcome(sent), "rank 1 sends a malformed request");
}

// A sender that announces more than was asked for writes nothing into the receiver's memory.
TEST_F(HostilePeer, LongerDataThanRequestedAreAMismatch) {
  char bytes[4] = {};
  const auto received = post(false, bytes, 2);
  write(at_data_, {.count = 4});
  EXPECT_THAT(outcome(received), HasSubstr("rank 1 sends uint8[4] under tag 0 and rank 0 receives uint8[2]"));
}

TEST_F(HostilePeer, TruncatedDataAndFramesAreErrors) {
  char bytes[4] = {};
  const auto received = post(false, bytes, 4), next = post(false, bytes, 4), sent = post(true, bytes, 4);
  write(at_data_, {.count = 4});
  ASSERT_EQ(::send(at_data_.get(), "ab", 2, MSG_NOSIGNAL), 2);
  write(at_requests_, {.count = 4}, 7);
  at_data_.reset();
  at_requests_.reset();
  for (const auto& message : {received, next, sent}) EXPECT_THAT(outcome(message), HasSubstr("rank 1"));
}

// The peer asks for data and never reads them: nothing blocks, and abort() frees the memory.
TEST_F(HostilePeer, APeerThatDoesNotReadBlocksNobody) {
  std::vector<char> data(std::size_t{64} << 20);
  write(at_requests_, {.count = std::ssize(data)});
  const auto sent = post(true, data.data(), std::ssize(data));
  EXPECT_FALSE(sent->is_done());
  transport_->abort(0);
  EXPECT_TRUE(sent->is_done());
  std::vector<char>().swap(data);
  transport_.reset();
}

// A forked process holds all descriptors of its parent.
TEST_F(HostilePeer, ACopyOfTheSocketsKeepsNoConnection) {
  auto [to, at_requests] = connected_pair();
  auto [from, at_data] = connected_pair();
  const UniqueFd copies[] = {UniqueFd(dup(to.get())), UniqueFd(dup(from.get()))};
  MessageTransport transport(0, sockets_of(0, std::move(to), std::move(from)), changes_.teller());
  transport.abort(0);
  for (const UniqueFd* peer : {&at_requests, &at_data}) {
    pollfd poll_fd{peer->get(), POLLIN, 0};
    ASSERT_EQ(poll(&poll_fd, 1, 60'000), 1);
    MessageFrame frame;
    while (recv(peer->get(), &frame, sizeof frame, 0) > 0) continue;
    EXPECT_EQ(recv(peer->get(), &frame, sizeof frame, 0), 0);
  }
}

TEST(MessageTransport, AnErrorOnItsThreadFailsTheGroup) {
  for (const bool is_out_of_memory : {false, true}) {
    auto [to, at_requests] = connected_pair();
    auto [from, at_data] = connected_pair();
    std::promise<void> told;
    int calls = 0;
    MessageTransport transport(0, sockets_of(0, std::move(to), std::move(from)), [&] {
      if (++calls == 2) return told.set_value();
      if (is_out_of_memory) throw std::bad_alloc();
      throw std::runtime_error("a broken bell");
    });
    char bytes[2] = {};
    const Transfer transfer{.is_send = false, .data = bytes, .count = 1, .dtype = DataType::u8, .peer = 1};
    const auto first = transport.post(transfer), second = transport.post(transfer);
    const MessageFrame frame{.count = 1};
    ASSERT_EQ(::send(at_data.get(), &frame, sizeof frame, 0), static_cast<ssize_t>(sizeof frame));
    ASSERT_EQ(::send(at_data.get(), "a", 1, 0), 1);
    ASSERT_EQ(told.get_future().wait_for(seconds(60)), std::future_status::ready);
    ASSERT_TRUE(first->is_done() && second->is_done());
    EXPECT_EQ(first->error(), "");
    EXPECT_THAT(second->error(), HasSubstr(is_out_of_memory ? "bad_alloc" : "a broken bell"));
    char rest = 0;
    while (recv(at_requests.get(), &rest, 1, MSG_DONTWAIT) > 0) continue;
    EXPECT_EQ(recv(at_requests.get(), &rest, 1, 0), 0) << "the peers see it, too";
  }
}

// The receiver's system takes little, so the sender's holds most of what is sent.
std::pair<UniqueFd, UniqueFd> connected_by_tcp() {
  const int sent_bytes = 512 * 1024, received_bytes = 8 * 1024;
  const UniqueFd listener = listen_on({"127.0.0.1", 0});
  setsockopt(listener.get(), SOL_SOCKET, SO_RCVBUF, &received_bytes, sizeof received_bytes);
  UniqueFd client = connect_to(local_address(listener.get()), seconds(60), "the test");
  setsockopt(client.get(), SOL_SOCKET, SO_SNDBUF, &sent_bytes, sizeof sent_bytes);
  pollfd poll_fd{listener.get(), POLLIN, 0};
  poll(&poll_fd, 1, 60'000);
  return {std::move(client), UniqueFd(accept(listener.get(), nullptr, nullptr))};
}

// A request that comes after the sender has closed would reset the connection, and its data with it.
TEST(MessageTransport, WhatWasSentArrivesThoughThePeerRequestsMore) {
  auto [to, at_requests] = connected_by_tcp();
  auto [from, at_data] = connected_by_tcp();
  Changes changes;
  auto transport =
      std::make_unique<MessageTransport>(0, sockets_of(0, std::move(to), std::move(from)), changes.teller());
  std::vector<char> data(200'000, 'x'), got(sizeof(MessageFrame) + data.size());
  const MessageFrame request{.count = std::ssize(data)};
  ASSERT_EQ(::send(at_requests.get(), &request, sizeof request, 0), static_cast<ssize_t>(sizeof request));
  const auto sent = transport->post(
      {.is_send = true, .data = data.data(), .count = std::ssize(data), .dtype = DataType::u8, .peer = 1});
  ASSERT_TRUE(changes.await([&] { return sent->is_done(); }));
  auto leaving = std::async(std::launch::async, [&] { transport.reset(); });
  leaving.wait_for(std::chrono::milliseconds(100));
  ::send(at_requests.get(), &request, sizeof request, MSG_NOSIGNAL);
  EXPECT_EQ(receive_all(at_requests.get(), got.data(), got.size(), std::chrono::steady_clock::now() + seconds(60)),
            IoResult::done);
}

TEST(MessageTransport, LeavingDoesNotWaitForeverForAPeerThatReadsNothing) {
  auto [to, at_requests] = connected_by_tcp();
  auto [from, at_data] = connected_by_tcp();
  Changes changes;
  auto transport =
      std::make_unique<MessageTransport>(0, sockets_of(0, std::move(to), std::move(from)), changes.teller());
  std::vector<char> data(200'000, 'x');
  const auto sent = transport->post({.is_send = true,
                                     .data = data.data(),
                                     .count = std::ssize(data),
                                     .dtype = DataType::u8,
                                     .peer = 1,
                                     .tag = kCollectiveTag});
  ASSERT_TRUE(changes.await([&] { return sent->is_done(); }));
  const auto begin = std::chrono::steady_clock::now();
  transport.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(30));
}

}  // namespace
}  // namespace phalanx
