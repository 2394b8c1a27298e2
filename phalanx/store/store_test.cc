#include "phalanx/store/store.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/quiet_fork.h"
#include "phalanx/store/hash_store.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/tcp_store_wire.h"
#include "phalanx/store/testing/free_address.h"

namespace phalanx {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The same cases for every kind of store; each call of client() is a client of the same store.
struct StoreKind {
  std::string name;
  std::function<std::function<std::shared_ptr<Store>()>()> make;
};

class EveryStore : public testing::TestWithParam<StoreKind> {
 protected:
  void SetUp() override { client = GetParam().make(); }
  std::function<std::shared_ptr<Store>()> client;
};

TEST_P(EveryStore, KeepsValuesOfAnyBytes) {
  const auto a = client(), b = client();
  const std::string bytes("\0\xff\n", 3);
  a->set("binary", bytes);
  a->set("empty", "");
  EXPECT_EQ(b->get("binary"), bytes);
  EXPECT_EQ(b->try_get("empty"), "");
  EXPECT_EQ(b->try_get("absent"), std::nullopt);
  a->set("binary", "new");
  EXPECT_EQ(b->get("binary"), "new");
  const std::string large(5'000'000, 'x');
  a->set("large", large);
  EXPECT_EQ(b->get("large"), large);
  EXPECT_TRUE(a->delete_key("binary"));
  EXPECT_FALSE(a->delete_key("binary"));
  EXPECT_EQ(b->try_get("binary"), std::nullopt);
}

TEST_P(EveryStore, CountsAtomically) {
  const auto store = client();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, own = client()] {
      for (int i = 0; i < 50; ++i) own->add("counter", 1);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(store->add("counter", -1), 199);
  EXPECT_EQ(store->get("counter"), "199");
  store->set("word", "seven");
  EXPECT_THAT(error_text([&] { store->add("word", 1); }), AllOf(HasSubstr("'word'"), HasSubstr("not an integer")));
  store->set("most", "9223372036854775807");
  EXPECT_THAT(error_text([&] { store->add("most", 1); }), HasSubstr("overflows"));
}

TEST_P(EveryStore, ComparesAndSets) {
  const auto store = client();
  EXPECT_EQ(store->compare_and_set("k", "a", "b"), std::nullopt);
  EXPECT_EQ(store->try_get("k"), std::nullopt);
  EXPECT_EQ(store->compare_and_set("k", std::nullopt, "a"), "a");
  EXPECT_EQ(store->compare_and_set("k", std::nullopt, "c"), "a");
  EXPECT_EQ(store->compare_and_set("k", "x", "b"), "a");
  EXPECT_EQ(store->compare_and_set("k", "a", "b"), "b");
  EXPECT_EQ(store->get("k"), "b");
}

TEST_P(EveryStore, WaitsForKeysOfOthers) {
  const auto a = client();
  std::thread other([b = client()] {
    b->wait({"go"});
    b->set("x", "1");
    b->add("y", 2);
    b->compare_and_set("z", std::nullopt, "3");
  });
  a->set("go", "");
  EXPECT_EQ(a->get_all({"z", "x", "y", "x"}, seconds(20)), (std::vector<std::string>{"3", "1", "2", "1"}));
  other.join();
  EXPECT_EQ(a->wait_any({"never", "y", "x"}), "y");
  std::thread late([b = client()] { b->set("second", ""); });
  EXPECT_EQ(a->wait_any({"first", "second"}, seconds(20)), "second");
  late.join();
}

TEST_P(EveryStore, NamesTheMissingKeysOnTimeout) {
  const auto store = client();
  store->set("rank/0", "");
  EXPECT_THAT(error_text([&] {
                store->wait({"rank/0", "rank/1", "rank/2"}, milliseconds(30));
              }),
              AllOf(HasSubstr(store->describe()), HasSubstr("30 ms"), HasSubstr("still missing 2: rank/1, rank/2"),
                    Not(HasSubstr("rank/0"))));
  EXPECT_THAT(error_text([&] { store->get("one", milliseconds(10)); }), HasSubstr("for the key one"));
  EXPECT_THAT(error_text([&] { store->wait_any({"p", "q"}, milliseconds(10)); }), HasSubstr("any of the keys p, q"));
  EXPECT_THROW(store->get_all({"rank/0", "one"}, milliseconds(10)), StoreTimeout);
  EXPECT_THROW(store->wait_any({"p", "q"}, milliseconds(10)), StoreTimeout);
  store->set("one", "still usable");
  EXPECT_EQ(store->get("one"), "still usable");
}

TEST_P(EveryStore, AKeyDeletedWhileItIsWaitedForIsMissing) {
  const auto a = client(), b = client();
  std::atomic<bool> done = false;
  std::thread waiter([&, own = client()] {
    own->wait({"first", "second"}, seconds(20));
    done = true;
  });
  a->set("first", "");
  a->delete_key("first");
  a->set("second", "");
  EXPECT_THAT(error_text([&] { b->wait({"first", "second"}, milliseconds(20)); }), HasSubstr("missing 1: first"));
  EXPECT_FALSE(done);
  a->set("first", "");
  waiter.join();
  EXPECT_TRUE(done);
}

TEST_P(EveryStore, PrefixesKeepUsersApart) {
  const auto base = client();
  PrefixStore a(base, "a"), b(base, "b");
  a.set("k", "1");
  b.add("k", 5);
  EXPECT_EQ(a.get("k"), "1");
  EXPECT_EQ(base->get("b/k"), "5");
  EXPECT_EQ(a.wait_any({"none", "k"}), "k");
  EXPECT_EQ(b.compare_and_set("k", "5", "6"), "6");
  EXPECT_THAT(error_text([&] { a.get("absent", milliseconds(5)); }), HasSubstr("a/absent"));
  EXPECT_TRUE(a.delete_key("k"));
  EXPECT_EQ(b.try_get("k"), "6");
}

TEST_P(EveryStore, RefusesKeysAndValuesOutOfBounds) {
  const auto store = client();
  EXPECT_THAT(error_text([&] { store->set("", "x"); }), HasSubstr("must not be empty"));
  EXPECT_THAT(error_text([&] { store->get(std::string(1025, 'k')); }), HasSubstr("at most 1024"));
  EXPECT_THAT(error_text([&] { store->set("k", std::string(Store::kMaxValueBytes + 1, 'v')); }),
              HasSubstr("at most 67108864"));
}

TEST_P(EveryStore, AnInterruptEndsTheCallsOfOneClientAndNoOthers) {
  const auto base = client();
  const auto interrupted = base->clone(), other = base->clone();
  std::string errors[2];
  std::thread gets([&] { errors[0] = error_text([&] { interrupted->get("never", seconds(60)); }); });
  std::thread waits([&] { errors[1] = error_text([&] { interrupted->wait_any({"p", "q"}, seconds(60)); }); });
  std::thread goes_on([&] { other->wait({"later"}, seconds(60)); });
  interrupted->set("begun", "");
  const auto start = std::chrono::steady_clock::now();
  interrupted->interrupt(seconds(1));             // the threads are in their calls by then
  interrupted->interrupt(std::chrono::hours(1));  // the earliest counts
  gets.join();
  waits.join();
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_GE(took, seconds(1));
  EXPECT_LT(took, seconds(20));
  EXPECT_THAT(errors[0], AllOf(HasSubstr(base->describe()), HasSubstr("key 'never': interrupted")));
  EXPECT_THAT(errors[1], AllOf(HasSubstr("'p'"), HasSubstr("interrupted")));
  const std::vector<std::function<void()>> later{
      [&] { interrupted->set("begun", "again"); },
      [&] { interrupted->try_get("begun"); },
      [&] { interrupted->get("begun"); },
      [&] { interrupted->add("count", 1); },
      [&] { interrupted->compare_and_set("begun", "", "again"); },
      [&] { interrupted->delete_key("begun"); },
      [&] { interrupted->set_when_lost("begun", "again"); },
  };
  for (std::size_t i = 0; i < later.size(); ++i) EXPECT_THAT(error_text(later[i]), HasSubstr("interrupted")) << i;
  base->set("later", "");
  goes_on.join();
  EXPECT_EQ(interrupted->clone()->try_get("begun"), "");
}

TEST_P(EveryStore, AnInterruptOfAPrefixIsItsBases) {
  const auto base = client();
  PrefixStore users(base, "users");
  users.set_timeout(seconds(7));
  const auto own = users.clone();
  EXPECT_EQ(own->timeout(), seconds(7));
  own->set("k", "1");
  own->interrupt();
  EXPECT_THAT(error_text([&] { own->get("k"); }), HasSubstr("interrupted"));
  EXPECT_EQ(base->get("users/k"), "1");
  users.interrupt();
  EXPECT_THAT(error_text([&] { base->get("users/k"); }), HasSubstr("interrupted"));
}

INSTANTIATE_TEST_SUITE_P(Stores, EveryStore,
                         testing::Values(StoreKind{"Local",
                                                   [] {
                                                     auto store = std::make_shared<HashStore>();
                                                     return [store]() -> std::shared_ptr<Store> { return store; };
                                                   }},
                                         StoreKind{"Tcp",
                                                   [] {
                                                     auto server = std::make_shared<TcpStoreServer>();
                                                     return [server]() -> std::shared_ptr<Store> {
                                                       return std::make_shared<TcpStore>(server->address());
                                                     };
                                                   }},
                                         StoreKind{"TcpWithSecret",
                                                   [] {
                                                     auto server = std::make_shared<TcpStoreServer>(
                                                         TcpStoreServerOptions{.secret = "sixteen bytes or more"});
                                                     return [server]() -> std::shared_ptr<Store> {
                                                       return std::make_shared<TcpStore>(
                                                           server->address(),
                                                           TcpStoreOptions{.secret = "sixteen bytes or more"});
                                                     };
                                                   }}),
                         [](const auto& info) { return info.param.name; });

// ---- TcpStore only ----

// How long after a client's death the server reports it.
std::chrono::steady_clock::duration time_to_tell_of_a_death() {
  TcpStoreServer server;
  TcpStore store(server.address());
  const pid_t child = quiet_fork();
  if (child == 0) {
    // Nothing in here may return to the test program.
    try {
      TcpStore own(server.address());
      own.set_when_lost("lost/1", "rank 1");
      own.set_when_lost("lost/cancelled", "");
      own.cancel_when_lost("lost/cancelled");
      own.set("ready", "");
      own.get("never");
    } catch (...) {
    }
    _exit(1);
  }
  store.wait({"ready"}, seconds(20));
  EXPECT_EQ(store.try_get("lost/1"), std::nullopt);
  const auto start = std::chrono::steady_clock::now();
  kill(child, SIGKILL);
  EXPECT_EQ(store.get("lost/1", seconds(20)), "rank 1");
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(store.try_get("lost/cancelled"), std::nullopt);
  waitpid(child, nullptr, 0);
  return took;
}

TEST(TcpStoreTest, ServerAnnouncesTheDeathOfAClient) {
  // A stalled machine makes it late once, not three times.
  auto took = time_to_tell_of_a_death();
  for (int more = 0; more < 2 && took >= seconds(1); ++more) took = time_to_tell_of_a_death();
  EXPECT_LT(took, seconds(1));
}

TEST(TcpStoreTest, StrangersHaveNoEffect) {
  TcpStoreServer server({.hello_timeout = milliseconds(200)});
  TcpStore store(server.address());
  store.set("k", "kept");
  const std::string hello = std::string("PHXSTORE") + std::string("\2\0\0\0", 4);
  const auto frame = [](std::string payload) {
    const auto size = static_cast<std::uint32_t>(payload.size());
    return std::string(reinterpret_cast<const char*>(&size), 4) + payload;
  };
  const std::vector<std::string> messages{
      "",                                                                    // silence
      "GET / HTTP/1.1\r\n\r\n",                                              // another protocol
      std::string("PHXSTORE") + std::string("\1\0\0\0", 4),                  // another version
      hello + std::string("\xff\xff\xff\xff", 4),                            // a frame of 4 GiB
      hello + std::string(4, '\0'),                                          // an empty frame
      hello + frame("\x63"),                                                 // an unknown operation
      hello + frame(std::string("\1\1\0\0\0k\xff\xff\xff\x7f", 10)),         // a value longer than its frame
      hello + frame(std::string("\1\0\0\0\0\0\0\0\0", 9)),                   // an empty key
      hello + frame(std::string("\5\0\0\0\0\0\0\0\0\xff\xff\xff\xff", 13)),  // 4 billion keys
      hello + frame(std::string("\2\1\0\0\0k", 6)) + "x",                    // more than one request at a time
      hello + frame(std::string("\2\1\0\0\0kk", 7)),                         // trailing bytes
  };
  for (const auto& message : messages) {
    UniqueFd fd = connect_to(server.address(), seconds(5), "the server");
    ASSERT_EQ(send(fd.get(), message.data(), message.size(), MSG_NOSIGNAL), static_cast<ssize_t>(message.size()));
    // The server hangs up: the end of the stream, or a reset, comes within the limit.
    for (char buffer[256];;) {
      pollfd poll_fd{fd.get(), POLLIN, 0};
      ASSERT_EQ(poll(&poll_fd, 1, 10'000), 1) << "still connected after: " << message;
      if (recv(fd.get(), buffer, sizeof buffer, 0) <= 0) break;
    }
    EXPECT_EQ(store.get("k"), "kept");
  }
}

TEST(TcpStoreTest, ClientWaitsForAServerThatComesLater) {
  const HostPort address = free_address();
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(30));  // not synchronisation: makes the refusal likely
    TcpStoreServer server({.port = address.port});
    TcpStore(address).get("done", seconds(20));
  });
  TcpStore store(address, {.connect_timeout = seconds(20)});
  store.set("done", "");
  late.join();
}

TEST(TcpStoreTest, ErrorsNameTheAddress) {
  TcpStoreServer server;
  const auto taken = server.address();
  EXPECT_THAT(error_text([&] { TcpStoreServer second({.port = taken.port}); }),
              AllOf(HasSubstr(taken.text()), HasSubstr("port is in use")));
  EXPECT_THAT(error_text([] {
                TcpStore store({"no-such-host.invalid", 1});
              }),
              AllOf(HasSubstr("no-such-host.invalid"), HasSubstr("does not resolve")));
  EXPECT_THAT(error_text([] { TcpStoreServer server({.host = "192.0.2.1"}); }),
              AllOf(HasSubstr("192.0.2.1"), HasSubstr("not an address of this machine")));
  const HostPort gone = free_address();
  EXPECT_THAT(error_text([&] { TcpStore store(gone, {.connect_timeout = milliseconds(20)}); }),
              AllOf(HasSubstr(gone.text()), HasSubstr("connection refused")));
}

TEST(TcpStoreTest, TheEndOfTheServerIsAnErrorAtOnce) {
  auto server = std::make_unique<TcpStoreServer>();
  TcpStore store(server->address());
  std::string error;
  std::thread waiter([&] { error = error_text([&] { store.get("never"); }); });
  TcpStore(server->address()).set("k", "");
  server.reset();
  waiter.join();
  EXPECT_THAT(error, AllOf(HasSubstr("'never'"), HasSubstr("connection broke")));
  EXPECT_THROW(error_text<StoreTimeout>([&] { store.get("never", milliseconds(10)); }), CommError)
      << "a store that has ended does not answer";
}

// A store in a separate process, which can be stopped: then it is silent, and its connections stay open.
class StoppableStore {
 public:
  StoppableStore() {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("pipe");
    child_ = quiet_fork();
    if (child_ == 0) {
      // Nothing in here may return to the test program.
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      try {
        const TcpStoreServer server;
        const std::uint16_t port = server.address().port;
        [[maybe_unused]] const auto written = write(ends[1], &port, sizeof port);
        for (;;) pause();
      } catch (...) {
      }
      _exit(1);
    }
    close(ends[1]);
    if (read(ends[0], &port_, sizeof port_) != sizeof port_) port_ = 0;
    close(ends[0]);
  }
  ~StoppableStore() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  HostPort address() const { return {"127.0.0.1", port_}; }
  void stop() {
    kill(child_, SIGSTOP);
    waitpid(child_, nullptr, WUNTRACED);  // until it is stopped
  }
  void go_on() { kill(child_, SIGCONT); }

 private:
  pid_t child_ = -1;
  std::uint16_t port_ = 0;
};

// Runs the body in a forked child. Fails if that has not ended within 20 s.
void in_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
}

TEST(TcpStoreTest, AForkedChildDestroysItsCopiesAndDisturbsNobody) {
  auto server = std::make_unique<TcpStoreServer>();
  auto store = std::make_unique<TcpStore>(server->address());
  store->set("k", "v");
  store->set_when_lost("lost", "died");
  in_child([&] {
    store.reset();
    server.reset();
  });
  EXPECT_EQ(store->get("k"), "v");
  EXPECT_EQ(store->try_get("lost"), std::nullopt);
  EXPECT_EQ(TcpStore(server->address()).get("k"), "v");
}

TEST(TcpStoreTest, AForkedChildAsksThroughACloneOnly) {
  TcpStoreServer server;
  TcpStore store(server.address());
  store.set("k", "v");
  in_child([&] {
    const std::string text = error_text([&] { store.get("k"); });
    const auto own = store.clone();
    own->set("text", text);
    own->set("through a clone", own->get("k"));
  });
  EXPECT_THAT(store.get("text", seconds(20)),
              AllOf(HasSubstr(server.address().text()), HasSubstr("'k'"), HasSubstr("clone()"),
                    HasSubstr("belongs to the process that forked this one")));
  EXPECT_EQ(store.get("through a clone", seconds(20)), "v");
}

// Without the interrupt each of these calls takes 15 s at least, so the bound is one for any machine.
TEST(TcpStoreTest, AnInterruptEndsCallsOfASilentStoreAtOnce) {
  StoppableStore host;
  const TcpStore base(host.address());
  const auto asks = base.clone(), sets = base.clone(), connects = base.clone(), leaves = base.clone();
  asks->set("k", "");
  sets->set("k", "");
  leaves->set_when_lost("lost", "died");
  host.stop();
  const auto start = std::chrono::steady_clock::now();
  for (const auto& store : {asks, sets, connects, leaves}) store->interrupt(seconds(1));
  std::string errors[4];
  std::vector<std::thread> threads;
  threads.emplace_back([&] { errors[0] = error_text([&] { asks->get("never", seconds(60)); }); });
  threads.emplace_back([&] { errors[1] = error_text([&] { sets->set("k", "v"); }); });
  threads.emplace_back([&] { errors[2] = error_text([&] { connects->set("k", "v"); }); });
  threads.emplace_back([&] { errors[3] = error_text([&] { leaves->set_when_lost("lost", "left"); }); });
  for (auto& thread : threads) thread.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(5));
  const std::string name = base.describe();
  EXPECT_THAT(errors[0], HasSubstr(name + ": waiting for key 'never': interrupted"));
  EXPECT_THAT(errors[1], HasSubstr(name + ": set of key 'k': interrupted"));
  EXPECT_THAT(errors[2], HasSubstr(name + ": the greeting: interrupted"));
  EXPECT_THAT(errors[3], HasSubstr(name + ": set_when_lost of key 'lost': interrupted"));
}

// A server that was up and refuses is not one that is just starting. To wait for it would take a minute here.
TEST(TcpStoreTest, ACloneOfAServerThatHasEndedFailsAtOnce) {
  auto server = std::make_unique<TcpStoreServer>();
  const TcpStore base(server->address());
  const auto own = base.clone();
  server.reset();
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(error_text([&] { own->get("k", seconds(60)); }),
              AllOf(HasSubstr(base.server().text()), HasSubstr("refuses connections by now")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(20));
}

TEST(TcpStoreTest, AnInterruptEndsTheSearchForAServerThatIsNotUp) {
  const HostPort nobody = free_address();
  SocketInterrupt interrupt;
  const auto start = std::chrono::steady_clock::now();
  interrupt.at(start + milliseconds(100));
  EXPECT_THAT(error_text([&] { connect_to(nobody, seconds(60), "the server", {.interrupt = &interrupt}); }),
              AllOf(HasSubstr(nobody.text()), HasSubstr("interrupted")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(20));
}

// How a client leaves without waiting: the server reads its last request before the end of its connection.
TEST(TcpStoreTest, ASilentStoreHeedsLaterWhatItWasToldBeforeAClientLeft) {
  StoppableStore host;
  TcpStore base(host.address());
  auto leaves = base.clone();
  leaves->set_when_lost("rank", "died");
  host.stop();
  leaves->interrupt(seconds(1));
  EXPECT_THAT(error_text([&] { leaves->set_when_lost("rank", "left"); }), HasSubstr("interrupted"));
  leaves.reset();
  host.go_on();
  EXPECT_EQ(base.get("rank", seconds(20)), "left");
}

TEST(TcpStoreTest, WhatListensElsewhereIsNotAStore) {
  const UniqueFd listener = listen_on({"127.0.0.1", 0});
  const HostPort address{"127.0.0.1", local_port(listener.get())};
  std::thread stranger([&] {
    pollfd poll_fd{listener.get(), POLLIN, 0};
    poll(&poll_fd, 1, 20'000);
    UniqueFd fd(accept(listener.get(), nullptr, nullptr));
    send(fd.get(), "HTTP/1.1 400 Bad", 16, MSG_NOSIGNAL);
    char byte;
    while (recv(fd.get(), &byte, 1, 0) > 0) {
    }
  });
  EXPECT_THAT(error_text([&] { TcpStore store(address); }), HasSubstr("not a Phalanx store"));
  stranger.join();
}

TEST(HostPortTest, ParsesAndRefuses) {
  EXPECT_EQ(parse_host_port("localhost:80", "X").text(), "localhost:80");
  EXPECT_EQ(parse_host_port("[::1]:80", "X").host, "::1");
  EXPECT_EQ(parse_host_port("[::1]:80", "X").text(), "[::1]:80");
  for (const char* bad : {"", "host", ":1", "host:", "host:x", "host:65536", "host:-1", "::1:80", "[]:1"})
    EXPECT_THAT(error_text([&] { parse_host_port(bad, "PHALANX_STORE"); }),
                AllOf(HasSubstr("PHALANX_STORE"), HasSubstr("host:port")))
        << bad;
  EXPECT_TRUE(is_loopback("127.0.0.1"));
  EXPECT_TRUE(is_loopback("localhost"));
  EXPECT_FALSE(is_loopback("192.0.2.1"));
  EXPECT_EQ(address_towards({"127.0.0.1", 9}), "127.0.0.1");
}

}  // namespace
}  // namespace phalanx
