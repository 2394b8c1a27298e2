// The links of bandwidth.h between two processes: shared memory and loopback TCP.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>

#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/measure/bandwidth.h"

namespace phalanx::measure {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t kSlotBytes = 512U << 10;
constexpr int kBounces = 2000;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

[[noreturn]] void fail(const std::string& what) {
  throw Error(fmt::format("cannot measure a link between two processes: {}: {}", what, std::strerror(errno)));
}

/// A process that runs `body` and ends. It is killed when its parent dies or when this object is destroyed.
class Helper {
 public:
  explicit Helper(const std::function<void()>& body) {
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0) throw_not_started("a helper that measures", errno);
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() == parent) body();
      ::_exit(0);
    }
  }
  ~Helper() {
    ::kill(pid_, SIGKILL);  // its work is done, or this side has failed
    ::waitpid(pid_, nullptr, 0);
  }
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;

 private:
  pid_t pid_ = -1;
};

struct Ring {
  alignas(64) std::atomic<std::uint64_t> written{0};  // slots filled
  alignas(64) std::atomic<std::uint64_t> read{0};     // slots emptied
  alignas(64) std::atomic<std::uint64_t> ping{0};
  alignas(64) std::atomic<std::uint64_t> pong{0};
  alignas(4096) char slots[2][kSlotBytes];
};

/// Spins, and yields the core now and then, since the other process may need it. Returns false after ten seconds.
bool wait_until(const std::function<bool()>& ready) {
  const auto end = Clock::now() + std::chrono::seconds(10);
  for (std::uint64_t step = 1; !ready(); ++step) {
    if (step % 256 != 0) continue;
    ::sched_yield();
    if (step % 65'536 == 0 && Clock::now() > end) return false;
  }
  return true;
}

bool write_all(int fd, const char* data, std::uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t done = ::send(fd, data, bytes, MSG_NOSIGNAL);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    bytes -= static_cast<std::uint64_t>(done);
    data += done;
  }
  return true;
}

bool read_all(int fd, char* data, std::uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t done = ::recv(fd, data, bytes, 0);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    bytes -= static_cast<std::uint64_t>(done);
    data += done;
  }
  return true;
}

struct Socket {
  int fd = -1;
  ~Socket() {
    if (fd >= 0) ::close(fd);
  }
};

/// Runs in the helper: receives all bytes, acknowledges them with one byte, then returns each small message.
void serve(int listener, std::uint64_t bytes) {
  const int fd = ::accept(listener, nullptr, nullptr);
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const auto buffer = std::make_unique<char[]>(kSlotBytes);
  for (std::uint64_t done = 0; done < bytes; done += kSlotBytes) {
    if (!read_all(fd, buffer.get(), kSlotBytes)) return;
  }
  for (int bounce = 0; bounce < kBounces + 1; ++bounce) {
    if (!write_all(fd, buffer.get(), 1) || (bounce < kBounces && !read_all(fd, buffer.get(), 1))) return;
  }
}

}  // namespace

LinkSpeed measure_shared_memory(std::uint64_t bytes) {
  void* const memory = ::mmap(nullptr, sizeof(Ring), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("shared memory");
  const auto unmap = [](Ring* ring) { ::munmap(ring, sizeof(Ring)); };
  const std::unique_ptr<Ring, decltype(unmap)> ring(new (memory) Ring, unmap);
  const std::uint64_t slots = std::max<std::uint64_t>(2, bytes / kSlotBytes);
  const std::uint64_t warm = std::min<std::uint64_t>(8, slots);  // page faults

  const Helper helper([&ring, slots, warm] {
    const auto mine = std::make_unique<char[]>(kSlotBytes);
    for (std::uint64_t slot = 0; slot < slots + warm; ++slot) {
      if (!wait_until([&] { return ring->written.load(std::memory_order_acquire) > slot; })) return;
      std::memcpy(mine.get(), ring->slots[slot % 2], kSlotBytes);
      ring->read.store(slot + 1, std::memory_order_release);
    }
    for (std::uint64_t bounce = 1; bounce <= kBounces; ++bounce) {
      if (!wait_until([&] { return ring->ping.load(std::memory_order_acquire) == bounce; })) return;
      ring->pong.store(bounce, std::memory_order_release);
    }
  });

  const auto must = [](bool arrived) {
    if (arrived) return;
    errno = ETIMEDOUT;
    fail("the other process");
  };
  const auto mine = std::make_unique<char[]>(kSlotBytes);
  std::memset(mine.get(), 1, kSlotBytes);
  auto begin = Clock::now();
  for (std::uint64_t slot = 0; slot < slots + warm; ++slot) {
    must(wait_until([&] { return ring->read.load(std::memory_order_acquire) + 2 > slot; }));
    if (slot == warm) begin = Clock::now();
    std::memcpy(ring->slots[slot % 2], mine.get(), kSlotBytes);
    ring->written.store(slot + 1, std::memory_order_release);
  }
  must(wait_until([&] { return ring->read.load(std::memory_order_acquire) == slots + warm; }));
  LinkSpeed speed{static_cast<double>(slots * kSlotBytes) / seconds_since(begin), 0};

  begin = Clock::now();
  for (std::uint64_t bounce = 1; bounce <= kBounces; ++bounce) {
    ring->ping.store(bounce, std::memory_order_release);
    must(wait_until([&] { return ring->pong.load(std::memory_order_acquire) == bounce; }));
  }
  speed.latency_seconds = seconds_since(begin) / kBounces / 2;
  return speed;
}

LinkSpeed measure_loopback(std::uint64_t bytes) {
  const Socket listener{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (listener.fd < 0 || ::bind(listener.fd, any, size) != 0 || ::listen(listener.fd, 1) != 0 ||
      ::getsockname(listener.fd, any, &size) != 0) {
    fail("a socket on 127.0.0.1");
  }
  const std::uint64_t whole = std::max<std::uint64_t>(1, bytes / kSlotBytes) * kSlotBytes;
  const Helper helper([&] { serve(listener.fd, whole); });

  const Socket connection{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  if (connection.fd < 0) fail("a socket for 127.0.0.1");
  const timeval limit{10, 0};  // the helper may have died
  const int on = 1;
  ::setsockopt(connection.fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(connection.fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  ::setsockopt(connection.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (::connect(connection.fd, any, size) != 0) fail("a connection to 127.0.0.1");
  const auto buffer = std::make_unique<char[]>(kSlotBytes);
  std::memset(buffer.get(), 1, kSlotBytes);

  auto begin = Clock::now();
  for (std::uint64_t done = 0; done < whole; done += kSlotBytes) {
    if (!write_all(connection.fd, buffer.get(), kSlotBytes)) fail("writing to 127.0.0.1");
  }
  if (!read_all(connection.fd, buffer.get(), 1)) fail("reading from 127.0.0.1");
  LinkSpeed speed{static_cast<double>(whole) / seconds_since(begin), 0};

  begin = Clock::now();
  for (int bounce = 0; bounce < kBounces; ++bounce) {
    if (!write_all(connection.fd, buffer.get(), 1) || !read_all(connection.fd, buffer.get(), 1)) fail("127.0.0.1");
  }
  speed.latency_seconds = seconds_since(begin) / kBounces / 2;
  return speed;
}

}  // namespace phalanx::measure
