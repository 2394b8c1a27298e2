#include "phalanx/comm/hierarchical/node_discovery.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kProofMagic = 0x31464f4f5250ULL;  // "PROOF1"
constexpr std::size_t kProofPageBytes = 4096;
constexpr const char* kNothing = "-";  // a token, or an address, that is not there

struct ProofPage {
  std::uint64_t magic;
  std::int64_t rank;
  std::array<std::uint64_t, 2> token;
};

std::string token_text(const ProofPage& page) { return fmt::format("{:016x}{:016x}", page.token[0], page.token[1]); }

// This rank's token, where its peers can find it for as long as this lives.
class OwnPage {
 public:
  explicit OwnPage(int rank) {
    // A rank without shared memory is alone on its node. That is no error.
    page_.magic = kProofMagic;
    page_.rank = rank;
    if (getrandom(page_.token.data(), sizeof page_.token, 0) != static_cast<ssize_t>(sizeof page_.token)) return;
    descriptor_ = memfd_create("phalanx-proof", MFD_CLOEXEC);
    if (descriptor_ < 0) return;
    std::array<std::byte, kProofPageBytes> bytes{};
    std::memcpy(bytes.data(), &page_, sizeof page_);
    if (fchmod(descriptor_, 0600) == 0 &&
        write(descriptor_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()))
      return;
    close(descriptor_);
    descriptor_ = -1;
  }
  ~OwnPage() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  OwnPage(const OwnPage&) = delete;
  OwnPage& operator=(const OwnPage&) = delete;

  std::string address() const {
    return descriptor_ < 0 ? kNothing : fmt::format("/proc/{}/fd/{}", getpid(), descriptor_);
  }
  std::string token() const { return descriptor_ < 0 ? kNothing : token_text(page_); }

 private:
  ProofPage page_{};
  int descriptor_ = -1;
};

// The token in `rank`'s memory, if this process can share that memory.
std::optional<std::string> read_token(const std::string& address, int rank) {
  // Opened as a process that shares the memory would: writable, and mapped.
  const int descriptor = open(address.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return std::nullopt;
  struct stat status {};
  void* memory = MAP_FAILED;
  // The number may be a process of another rank's namespace: then this file may be anything.
  if (fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == kProofPageBytes)
    memory = mmap(nullptr, kProofPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (memory == MAP_FAILED) return std::nullopt;
  ProofPage page;
  std::memcpy(&page, memory, sizeof page);
  munmap(memory, kProofPageBytes);
  if (page.magic != kProofMagic || page.rank != rank) return std::nullopt;
  return token_text(page);
}

// What a rank says in the second exchange.
struct Claim {
  std::string own_token;
  int of = -1;  // the rank whose memory it has read; its own rank: it could read nobody's before its own
  std::string token_read;
};

}  // namespace

std::string local_host_id() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  std::string hint = boot_id;
  for (const char* name : {"net", "pid"}) {
    struct stat status {};
    const bool known = stat(fmt::format("/proc/self/ns/{}", name).c_str(), &status) == 0;
    hint += fmt::format(" {}:{}", name, known ? std::to_string(status.st_ino) : "?");
  }
  return hint;
}

std::vector<int> discover_nodes(int rank, int size,
                                const std::function<std::vector<std::string>(const std::string&)>& exchange,
                                const std::string& hint) {
  const auto check_size = [size](const std::vector<std::string>& values) {
    if (static_cast<int>(values.size()) != size)
      throw CommError(fmt::format("the nodes of {} ranks: {} have answered", size, values.size()));
  };
  const OwnPage page(rank);
  // "<address> <hint>"
  const std::vector<std::string> places = exchange(page.address() + " " + hint);
  check_size(places);
  const auto split = [](const std::string& text) {
    const std::size_t space = text.find(' ');
    return std::pair(text.substr(0, space), space == std::string::npos ? std::string() : text.substr(space + 1));
  };
  Claim mine{page.token(), rank, page.token()};
  for (int other = 0; other < rank; ++other) {
    const auto [address, its_hint] = split(places[static_cast<std::size_t>(other)]);
    if (its_hint != hint || address == kNothing) continue;
    if (const auto token = read_token(address, other)) {
      mine.of = other;
      mine.token_read = *token;
      break;
    }
  }
  // After this exchange nobody reads the memory any more.
  const std::vector<std::string> texts = exchange(fmt::format("{} {} {}", mine.own_token, mine.of, mine.token_read));
  check_size(texts);
  std::vector<Claim> claims(texts.size());
  for (std::size_t r = 0; r < texts.size(); ++r)
    std::istringstream(texts[r]) >> claims[r].own_token >> claims[r].of >> claims[r].token_read;

  std::vector<int> node_of;
  int nodes = 0;
  for (int r = 0; r < size; ++r) {
    const Claim& claim = claims[static_cast<std::size_t>(r)];
    const bool is_proved = claim.of >= 0 && claim.of < r && claim.token_read != kNothing &&
                           claim.token_read == claims[static_cast<std::size_t>(claim.of)].own_token;
    node_of.push_back(is_proved ? node_of[static_cast<std::size_t>(claim.of)] : nodes++);
  }
  return node_of;
}

}  // namespace phalanx
