// Authentication: the store's handshake, its refusals, and where the secret comes from.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/store/job_secret.h"
#include "phalanx/store/store_proof.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const std::string kSecret = "the secret of this job";
const std::string kOtherSecret = "the secret of another job";

std::string bytes_of(std::initializer_list<int> values) {
  std::string result;
  for (const int value : values) result.push_back(static_cast<char>(value));
  return result;
}

// RFC 4231, cases 1 to 4, 6 and 7: HMAC-SHA256 is called as it is meant to be.
TEST(StoreProofTest, HmacAgreesWithTheRfc) {
  const auto hex = [](const std::string& bytes) {
    std::string text;
    for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
    return text;
  };
  std::string counting;
  for (int i = 1; i <= 25; ++i) counting.push_back(static_cast<char>(i));
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(hex(hmac_sha256(counting, std::string(50, '\xcd'))),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "This is a test using a larger than block-size key and a larger than block-size data. The "
                            "key needs to be hashed before being used by the HMAC algorithm.")),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(StoreProofTest, DependsOnSecretRoleAndBothNonces) {
  const std::string a(kNonceBytes, 'a'), b(kNonceBytes, 'b');
  const std::string proof = store_proof(kSecret, ProofOf::client, a, b);
  EXPECT_TRUE(equal_secrets(proof, store_proof(kSecret, ProofOf::client, a, b)));
  EXPECT_FALSE(equal_secrets(proof, store_proof(kOtherSecret, ProofOf::client, a, b)));
  EXPECT_FALSE(equal_secrets(proof, store_proof(kSecret, ProofOf::server, a, b)));
  EXPECT_FALSE(equal_secrets(proof, store_proof(kSecret, ProofOf::client, b, b)));
  EXPECT_FALSE(equal_secrets(proof, store_proof(kSecret, ProofOf::client, a, a)));
  EXPECT_FALSE(equal_secrets(proof, proof.substr(1)));
  for (const std::size_t at : {std::size_t{0}, proof.size() - 1}) {  // every byte counts
    std::string other = proof;
    other[at] = static_cast<char>(other[at] ^ 1);
    EXPECT_FALSE(equal_secrets(proof, other)) << at;
  }
  EXPECT_NE(random_bytes(kNonceBytes), random_bytes(kNonceBytes));
}

// A server with its refusals collected, and a client that is at work all the while.
class GuardedStore : public testing::Test {
 protected:
  TcpStoreServerOptions options(std::string secret = kSecret) {
    return {.secret = std::move(secret), .on_refusal = [this](const std::string& line) {
              std::lock_guard lock(mutex_);
              refusals_.push_back(line);
            }};
  }
  std::vector<std::string> refusals() {
    std::lock_guard lock(mutex_);
    return refusals_;
  }
  // Connects, sends the message, and waits until the server closes; returns what the server sent.
  static std::string send_and_wait(const HostPort& address, const std::string& message) {
    const UniqueFd fd = connect_to(address, seconds(5), "the server");
    // Of a long message the server may have refused the first bytes before the last are sent.
    EXPECT_GE(send(fd.get(), message.data(), message.size(), MSG_NOSIGNAL), std::min<ssize_t>(1, std::ssize(message)));
    std::string answer;
    for (char chunk[256];;) {
      pollfd poll_fd{fd.get(), POLLIN, 0};
      if (poll(&poll_fd, 1, 10'000) != 1) return "still connected after: " + message;
      const ssize_t got = recv(fd.get(), chunk, sizeof chunk, 0);
      if (got <= 0) return answer;
      answer.append(chunk, static_cast<std::size_t>(got));
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> refusals_;
};

TEST_F(GuardedStore, AdmitsWhoKnowsTheSecretAndNobodyElse) {
  TcpStoreServer server(options());
  TcpStore member(server.address(), {.secret = kSecret});
  member.set("k", "kept");
  std::thread waiting([&] { EXPECT_EQ(member.get("later", seconds(20)), "1"); });
  EXPECT_THAT(
      error_with_kind([&] { TcpStore store(server.address()); }),
      AllOf(HasSubstr("ConfigError: store at " + server.address().text()),
            HasSubstr("asks for the job's secret, and this process has none"), HasSubstr("PHALANX_JOB_SECRET_FILE")));
  EXPECT_THAT(error_with_kind([&] { TcpStore store(server.address(), {.secret = kOtherSecret}); }),
              AllOf(HasSubstr("ConfigError: store at " + server.address().text()),
                    HasSubstr("the job secret of this process is not the store's")));
  TcpStore(server.address(), {.secret = kSecret}).set("later", "1");
  waiting.join();
  EXPECT_EQ(member.get("k"), "kept");
  const auto lines = refusals();
  EXPECT_THAT(lines, ElementsAre(AllOf(HasSubstr("store at " + server.address().text() + ": refused 127.0.0.1:"),
                                       HasSubstr(": it has no job secret")),
                                 AllOf(HasSubstr("refused 127.0.0.1:"), HasSubstr(": its job secret is another one"))));
  for (const auto& line : lines) EXPECT_THAT(line, Not(HasSubstr("secret of")));  // no secret is ever written out
}

TEST_F(GuardedStore, AClientWithASecretLeavesAStoreWithout) {
  TcpStoreServer server(options(""));
  EXPECT_THAT(error_with_kind([&] { TcpStore store(server.address(), {.secret = kSecret}); }),
              AllOf(HasSubstr("ConfigError: "), HasSubstr("this process has a job secret and the store was started "
                                                          "without")));
  EXPECT_THAT(refusals(), ElementsAre(HasSubstr("it has a job secret, and this store was started without")));
}

// A client sends no request to a server that only pretends to be the job's store.
TEST_F(GuardedStore, AFalseServerIsLeft) {
  for (const bool echoes : {false, true}) {
    const UniqueFd listener = listen_on({"127.0.0.1", 0});
    const HostPort address{"127.0.0.1", local_port(listener.get())};
    std::string heard;
    std::thread impostor([&] {
      pollfd poll_fd{listener.get(), POLLIN, 0};
      poll(&poll_fd, 1, 20'000);
      const UniqueFd fd(accept(listener.get(), nullptr, nullptr));
      std::string hello(12, '\0');
      recv(fd.get(), hello.data(), hello.size(), MSG_WAITALL);
      const std::string answer = "PHXSTORE" + bytes_of({2, 0, 0, 1}) + std::string(kNonceBytes, 'n');
      send(fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
      std::string proof(kNonceBytes + kProofBytes, '\0');
      recv(fd.get(), proof.data(), proof.size(), MSG_WAITALL);
      // The client's own proof handed back, or none at all.
      const std::string verdict = bytes_of({0}) + (echoes ? proof.substr(kNonceBytes) : std::string(kProofBytes, '\0'));
      send(fd.get(), verdict.data(), verdict.size(), MSG_NOSIGNAL);
      for (char byte; recv(fd.get(), &byte, 1, 0) > 0;) heard.push_back(byte);
    });
    EXPECT_THAT(error_with_kind([&] {
                  TcpStore store(address, {.secret = kSecret});
                  store.set("k", "v");
                }),
                HasSubstr("does not know this job's secret: it is not this job's store"));
    impostor.join();
    EXPECT_EQ(heard, "");
  }
}

TEST_F(GuardedStore, StrangersHaveNoEffect) {
  const std::string hello = "PHXSTORE" + bytes_of({2, 0, 1, 0});
  const auto expect_refused = [&](const TcpStoreServer& server, TcpStore& member, const std::string& message,
                                  const std::string& reason) {
    const std::size_t before = refusals().size();
    send_and_wait(server.address(), message);
    EXPECT_EQ(member.get("k"), "kept");
    const auto lines = refusals();
    ASSERT_EQ(lines.size(), before + 1) << message;
    EXPECT_THAT(lines.back(), HasSubstr(reason));
  };
  {
    // A client that sends too little is dropped after a while.
    auto limited = options();
    limited.hello_timeout = milliseconds(100);
    TcpStoreServer server(limited);
    TcpStore member(server.address(), {.secret = kSecret});
    member.set("k", "kept");
    for (const std::string& message :
         {std::string(), std::string("PHX"), hello, hello + std::string(63, 'x')})  // the last: a byte short of a proof
      expect_refused(server, member, message, "it has not greeted within 0.1 s");
  }
  // A client that sends the wrong bytes is dropped at once, whatever time it has left.
  const std::size_t earlier = refusals().size();
  TcpStoreServer server(options());
  TcpStore member(server.address(), {.secret = kSecret});
  member.set("k", "kept");
  const auto expect_wrong = [&](const std::string& message, const std::string& reason) {
    expect_refused(server, member, message, reason);
  };
  expect_wrong("GET / HTTP/1.1\r\n\r\n", "it does not speak the store's protocol");
  expect_wrong(std::string(1'000'000, 'x'), "it does not speak the store's protocol");
  expect_wrong("PHXSTORE" + bytes_of({9, 0, 0, 0}), "it speaks version 9 of the store's protocol, this store 2");
  expect_wrong("PHXSTORE" + bytes_of({2, 0, 7, 0}), "it does not speak the store's protocol");
  for (int guess = 0; guess < 5; ++guess)
    expect_wrong(hello + std::string(64, static_cast<char>('a' + guess)), "its job secret is another one");
  // Requests sent before the verdict are not executed: they are read as a proof, which is wrong. This is the tenth log
  // line, the last of this minute.
  expect_wrong(hello + bytes_of({9, 0, 0, 0, 1, 1, 0, 0, 0, 'k', 0, 0, 0, 0}) + std::string(64, 'x'),
               "its job secret is another one; further ones are not logged for a minute");
  send_and_wait(server.address(), "x");
  EXPECT_EQ(refusals().size(), earlier + 10);
  EXPECT_EQ(member.get("k"), "kept");
}

// One byte now and then does not extend the deadline of an unauthenticated client.
TEST_F(GuardedStore, SlowStrangersAreNotWaitedFor) {
  auto limited = options();
  limited.hello_timeout = milliseconds(100);
  TcpStoreServer server(limited);
  const auto start = std::chrono::steady_clock::now();
  const UniqueFd fd = connect_to(server.address(), seconds(5), "the server");
  const std::string hello = "PHXSTORE" + bytes_of({2, 0, 1, 0});
  for (const char byte : hello) {
    if (send(fd.get(), &byte, 1, MSG_NOSIGNAL) != 1) break;
    pollfd poll_fd{fd.get(), POLLIN, 0};
    if (poll(&poll_fd, 1, 20) == 1) break;  // the server hung up
  }
  pollfd poll_fd{fd.get(), POLLIN, 0};
  EXPECT_EQ(poll(&poll_fd, 1, 10'000), 1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(5));
  TcpStore(server.address(), {.secret = kSecret}).set("k", "v");
}

TEST_F(GuardedStore, ManyWhoNeverGreetKeepNobodyOut) {
  auto limited = options();
  limited.max_unauthenticated = 8;
  TcpStoreServer server(limited);
  TcpStore member(server.address(), {.secret = kSecret});
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 40; ++i) silent.push_back(connect_to(server.address(), seconds(5), "the server"));
  TcpStore(server.address(), {.secret = kSecret}).set("k", "v");
  EXPECT_EQ(member.get("k"), "v");
  ASSERT_FALSE(refusals().empty());
  EXPECT_THAT(refusals().front(), HasSubstr("8 connections have not greeted yet, and it is the oldest of them"));
  // The oldest connections have been closed.
  pollfd poll_fd{silent.front().get(), POLLIN, 0};
  EXPECT_EQ(poll(&poll_fd, 1, 10'000), 1);
}

TEST_F(GuardedStore, ManyClientsAtOnceAllComeIn) {
  auto limited = options();
  limited.max_unauthenticated = 8;
  TcpStoreServer server(limited);
  std::vector<std::thread> clients;
  for (int i = 0; i < 16; ++i)
    clients.emplace_back([&] {
      EXPECT_EQ(error_with_kind([&] { TcpStore(server.address(), {.secret = kSecret}).add("arrived", 1); }), "");
    });
  for (auto& client : clients) client.join();
  EXPECT_EQ(TcpStore(server.address(), {.secret = kSecret}).get("arrived"), "16");
}

// ---- where the secret comes from ----

class SecretFileTest : public testing::Test {
 protected:
  std::string file(const std::string& name, const std::string& contents, mode_t mode = 0600) {
    const std::string path = (folder_.path() / name).string();
    std::ofstream(path) << contents;
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }
  static JobSecret from(const std::map<std::string, std::string>& variables) {
    return job_secret_from_environment([&](const std::string& name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
  }
  static std::string error_of(const std::map<std::string, std::string>& variables) {
    return error_with_kind([&] { from(variables); });
  }
  TempDirectory folder_{"secret"};
};

TEST_F(SecretFileTest, ComesFromEitherVariable) {
  EXPECT_EQ(from({}).value, "");
  EXPECT_EQ(from({{"PHALANX_JOB_SECRET", ""}}).value, "");
  EXPECT_EQ(from({{"PHALANX_JOB_SECRET", kSecret}}).value, kSecret);
  EXPECT_EQ(from({{"PHALANX_JOB_SECRET", kSecret}}).source, "PHALANX_JOB_SECRET");
  const std::string path = file("s", kSecret + "\n");
  EXPECT_EQ(from({{"PHALANX_JOB_SECRET_FILE", path}}).value, kSecret);
  EXPECT_EQ(from({{"PHALANX_JOB_SECRET_FILE", path}}).source, "the file " + path);
  EXPECT_EQ(from({{"PHALANX_JOB_SECRET_FILE", path}, {"PHALANX_JOB_SECRET", kSecret}}).value, kSecret);
  EXPECT_THAT(error_of({{"PHALANX_JOB_SECRET_FILE", path}, {"PHALANX_JOB_SECRET", kOtherSecret}}),
              AllOf(HasSubstr("ConfigError"), HasSubstr("different secrets"), Not(HasSubstr(kSecret))));
  EXPECT_EQ(generate_job_secret().size(), 64);
  EXPECT_NE(generate_job_secret(), generate_job_secret());
}

TEST_F(SecretFileTest, RefusesFilesThatOthersMayRead) {
  for (const mode_t mode : {0640, 0604, 0660, 0644, 0601}) {
    const std::string path = file(fmt::format("m{:o}", mode), kSecret, mode);
    EXPECT_THAT(error_of({{"PHALANX_JOB_SECRET_FILE", path}}),
                AllOf(HasSubstr("ConfigError: PHALANX_JOB_SECRET_FILE: " + path),
                      HasSubstr(fmt::format("has mode {:04o}", mode)), HasSubstr("chmod 600 " + path)));
  }
  EXPECT_EQ(from({{"PHALANX_JOB_SECRET_FILE", file("read-only", kSecret, 0400)}}).value, kSecret);
}

TEST_F(SecretFileTest, RefusesWhatIsNoSecret) {
  EXPECT_THAT(error_of({{"PHALANX_JOB_SECRET", "short"}}),
              AllOf(HasSubstr("PHALANX_JOB_SECRET: the job's secret has 5 bytes: expected 16 to 4096"),
                    HasSubstr("openssl rand -hex 32")));
  EXPECT_THAT(error_of({{"PHALANX_JOB_SECRET_FILE", file("empty", "\n")}}), HasSubstr("has 0 bytes"));
  EXPECT_THAT(error_of({{"PHALANX_JOB_SECRET_FILE", file("two", kSecret + "\n" + kSecret)}}), HasSubstr("line break"));
  EXPECT_THAT(error_of({{"PHALANX_JOB_SECRET_FILE", file("large", std::string(100'000, 'x'))}}),
              HasSubstr("more than 4098 bytes"));
  EXPECT_THAT(error_of({{"PHALANX_JOB_SECRET_FILE", (folder_.path() / "none").string()}}),
              HasSubstr("there is no file"));
  EXPECT_THAT(error_of({{"PHALANX_JOB_SECRET_FILE", folder_.path().string()}}), HasSubstr("is not a regular file"));
}

TEST_F(SecretFileTest, PrivateFilesAreWhollyThereAndPrivate) {
  const std::string path = (folder_.path() / "private").string();
  EXPECT_EQ(read_private_file(path, "a test", 100), std::nullopt);
  for (const char* contents : {"first", "second and longer"}) {
    write_private_file(path, contents);
    EXPECT_EQ(read_private_file(path, "a test", 100), contents);
    struct stat status {};
    ASSERT_EQ(stat(path.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 07777, 0600);
  }
  EXPECT_THAT(error_with_kind([&] { write_private_file((folder_.path() / "no/such").string(), "x"); }),
              AllOf(HasSubstr("CommError: cannot create"), HasSubstr("No such file")));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), 1);  // no scratch file is left
}

}  // namespace
}  // namespace phalanx
