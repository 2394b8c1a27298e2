#include "phalanx/comm/backends/local_shm/shared_pages.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <system_error>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kMagic = 0x325358414c414850ULL;  // "PHALAXS2": changes with what lies in the memory
constexpr std::size_t kHeadBytes = 4096;                 // a page: data() begins at one

struct Head {
  std::uint64_t magic;
  std::array<std::uint64_t, 2> token;
  std::array<std::uint64_t, 3> form;
};

std::string system_text() { return std::generic_category().message(errno); }

}  // namespace

SharedPages::SharedPages(std::size_t bytes) : bytes_(kHeadBytes + (bytes + kHeadBytes - 1) / kHeadBytes * kHeadBytes) {}

SharedPages::~SharedPages() {
  close_descriptor();
  if (base_) munmap(base_, bytes_);
}

void SharedPages::close_descriptor() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

void SharedPages::map() {
  void* address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor_, 0);
  if (address == MAP_FAILED)
    throw CommError(fmt::format("shared memory is not available: mapping {} bytes failed: {}", bytes_, system_text()));
  base_ = static_cast<std::byte*>(address);
  data_ = base_ + kHeadBytes;
}

void SharedPages::take(std::size_t begin, std::size_t bytes) { take_from(kHeadBytes + begin, bytes); }

void SharedPages::take_from(std::size_t begin, std::size_t bytes) {
  constexpr std::size_t kAtOnce = 16U << 20;  // a signal interrupts fallocate, which then undoes its allocation
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t part = std::min(kAtOnce, bytes - done);
    const int status = posix_fallocate(descriptor_, static_cast<off_t>(begin + done), static_cast<off_t>(part));
    if (status == EINTR) continue;
    if (status != 0)
      throw CommError(fmt::format("shared memory is not available: {} bytes cannot be had: {}", bytes,
                                  std::generic_category().message(status)));
    done += part;
  }
}

void SharedPages::create(const std::array<std::uint64_t, 3>& form) {
  descriptor_ = memfd_create("phalanx", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor_ < 0)
    throw CommError(fmt::format("shared memory is not available: memfd_create failed: {}", system_text()));
  if (fchmod(descriptor_, 0600) != 0 || ftruncate(descriptor_, static_cast<off_t>(bytes_)) != 0 ||
      fcntl(descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    throw CommError(fmt::format("shared memory is not available: {} bytes cannot be had: {}", bytes_, system_text()));
  take_from(0, kHeadBytes);
  map();
  auto* head = reinterpret_cast<Head*>(base_);
  head->magic = kMagic;
  head->form = form;
  if (getrandom(head->token.data(), sizeof(head->token), 0) != static_cast<ssize_t>(sizeof(head->token)))
    throw CommError(fmt::format("no random numbers for the shared segment: {}", system_text()));
  address_ = fmt::format("{} {} {} {}", getpid(), descriptor_, head->token[0], head->token[1]);
}

void SharedPages::open(const std::string& address, const std::array<std::uint64_t, 3>& form) {
  int pid = 0;
  int fd = -1;
  std::array<std::uint64_t, 2> token{};
  std::istringstream(address) >> pid >> fd >> token[0] >> token[1];
  const std::string path = fmt::format("/proc/{}/fd/{}", pid, fd);
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor_ < 0)
    throw CommError(
        fmt::format("cannot open the shared memory of process {} ({}: {}); the ranks of an shm group must "
                    "run on one node, as one user and in one PID namespace",
                    pid, path, system_text()));
  struct stat status {};
  if (fstat(descriptor_, &status) != 0 || static_cast<std::size_t>(status.st_size) != bytes_)
    throw CommError(
        fmt::format("{} is not the shared memory of this group: {} bytes, expected {}", path, status.st_size, bytes_));
  map();
  const auto* head = reinterpret_cast<const Head*>(base_);
  if (head->magic != kMagic || head->token != token || head->form != form)
    throw CommError(
        fmt::format("{} is not the shared memory of this group (the token inside differs: another "
                    "node or PID namespace, or another version of the program)",
                    path));
}

std::shared_ptr<SharedPages> SharedPages::make(Request request, const Exchange& exchange) {
  std::shared_ptr<SharedPages> pages;
  // A failure here is sent to the others, so that all give up together instead of waiting.
  const auto attempt = [](auto body) -> std::string {
    try {
      body();
      return {};
    } catch (const CommError& e) {
      return e.what();
    }
  };
  const auto prepare = [&] {
    if (request.prepare) request.prepare(*pages);
  };
  if (request.rank >= 0) pages.reset(new SharedPages(request.bytes));
  std::string error;
  if (request.rank == 0) {
    error = attempt([&] {
      pages->create(request.form);
      prepare();
    });
  }
  const std::vector<std::string> addresses = exchange(error.empty() && request.rank == 0 ? pages->address_ : error);
  if (request.rank > 0) {
    const std::string& address = addresses[static_cast<std::size_t>(request.members[0])];
    // An address starts with a process id, an error text does not.
    const bool is_address = !address.empty() && address[0] >= '0' && address[0] <= '9';
    error = is_address ? attempt([&] {
      pages->open(address, request.form);
      prepare();
    })
                       : address;
  }
  const std::vector<std::string> errors = exchange(error);
  if (request.rank < 0) return nullptr;
  for (std::size_t i = 0; i < request.members.size(); ++i) {
    const std::string& text = errors[static_cast<std::size_t>(request.members[i])];
    if (!text.empty()) throw CommError(fmt::format("rank {}: {}", i, text));
  }
  pages->close_descriptor();
  return pages;
}

}  // namespace phalanx
