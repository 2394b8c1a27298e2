#include "phalanx/comm/shm_segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kMagic = 0x315358414c414850ULL;  // "PHALAXS1": changes with the layout of the segment
constexpr std::size_t kPage = 4096;

struct SegmentHead {
  std::uint64_t magic;
  std::array<std::uint64_t, 2> token;
  std::int64_t size;
  std::uint64_t slot_bytes;
  std::uint64_t chunk_bytes;
};

std::size_t to_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::string system_text() { return std::generic_category().message(errno); }

}  // namespace

ShmSegment::ShmSegment(const ShmLayout& layout) : layout_(layout) {
  const auto n = static_cast<std::size_t>(layout.size);
  board_at_ = kPage;
  ranks_at_ = board_at_ + to_pages(sizeof(BoardHead));
  channels_at_ = ranks_at_ + to_pages(n * sizeof(RankBoard));
  const std::size_t slots_at = channels_at_ + to_pages(n * n * sizeof(Channel));
  channel_slots_at_ = slots_at + to_pages(n * kBuffers * layout.slot_bytes);
  bytes_ = channel_slots_at_ + to_pages(n * n * kChannelEntries * layout.chunk_bytes);
  slots_ = reinterpret_cast<std::byte*>(slots_at);  // an offset until it is mapped
}

ShmSegment::~ShmSegment() {
  close_descriptor();
  if (base_) munmap(base_, bytes_);
}

void ShmSegment::close_descriptor() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

void ShmSegment::map(int descriptor) {
  void* address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (address == MAP_FAILED)
    throw CommError(fmt::format("shared memory is not available: mapping {} bytes failed: {}", bytes_, system_text()));
  base_ = static_cast<std::byte*>(address);
  slots_ = base_ + reinterpret_cast<std::size_t>(slots_);
}

void ShmSegment::create() {
  const int fd = memfd_create("phalanx", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw CommError(fmt::format("shared memory is not available: memfd_create failed: {}", system_text()));
  descriptor_ = fd;
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, static_cast<off_t>(bytes_)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    throw CommError(fmt::format("shared memory is not available: {} bytes cannot be had: {}", bytes_, system_text()));
  // The pages that every rank uses are taken now: a full memory is an error here, not a signal later.
  if (const int status = posix_fallocate(fd, 0, static_cast<off_t>(channels_at_)); status != 0)
    throw CommError(fmt::format("shared memory is not available: {} bytes cannot be had: {}", channels_at_,
                                std::generic_category().message(status)));
  map(fd);
  auto* head = reinterpret_cast<SegmentHead*>(base_);
  head->magic = kMagic;
  head->size = layout_.size;
  head->slot_bytes = layout_.slot_bytes;
  head->chunk_bytes = layout_.chunk_bytes;
  if (getrandom(head->token.data(), sizeof(head->token), 0) != static_cast<ssize_t>(sizeof(head->token)))
    throw CommError(fmt::format("no random numbers for the shared segment: {}", system_text()));
  address_ = fmt::format("{} {} {} {}", getpid(), fd, head->token[0], head->token[1]);
}

void ShmSegment::open(const std::string& address) {
  int pid = 0;
  int fd = -1;
  std::array<std::uint64_t, 2> token{};
  std::istringstream(address) >> pid >> fd >> token[0] >> token[1];
  const std::string path = fmt::format("/proc/{}/fd/{}", pid, fd);
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor_ < 0)
    throw CommError(
        fmt::format("cannot open the shared memory of process {} ({}: {}); the ranks of an shm group must "
                    "run on one machine, as one user and in one PID namespace",
                    pid, path, system_text()));
  struct stat status {};
  if (fstat(descriptor_, &status) != 0 || static_cast<std::size_t>(status.st_size) != bytes_)
    throw CommError(
        fmt::format("{} is not the shared memory of this group: {} bytes, expected {}", path, status.st_size, bytes_));
  map(descriptor_);
  const auto* head = reinterpret_cast<const SegmentHead*>(base_);
  if (head->magic != kMagic || head->token != token || head->size != layout_.size ||
      head->slot_bytes != layout_.slot_bytes || head->chunk_bytes != layout_.chunk_bytes)
    throw CommError(
        fmt::format("{} is not the shared memory of this group (the token inside differs: another "
                    "machine or PID namespace, or another version of the program)",
                    path));
}

std::shared_ptr<ShmSegment> ShmSegment::make(const ShmLayout& layout, const std::vector<int>& members, int rank,
                                             const Exchange& exchange) {
  std::shared_ptr<ShmSegment> segment;
  // What fails here is told to the others, so that all give up together instead of waiting.
  const auto attempt = [](auto body) -> std::string {
    try {
      body();
      return {};
    } catch (const CommError& e) {
      return e.what();
    }
  };
  if (rank >= 0) segment.reset(new ShmSegment(layout));
  std::string error;
  if (rank == 0) error = attempt([&] { segment->create(); });
  const std::vector<std::string> addresses = exchange(error.empty() && rank == 0 ? segment->address_ : error);
  if (rank > 0) {
    const std::string& address = addresses[static_cast<std::size_t>(members[0])];
    // An address starts with a process id, an error text does not.
    const bool is_address = !address.empty() && address[0] >= '0' && address[0] <= '9';
    error = is_address ? attempt([&] { segment->open(address); }) : address;
  }
  const std::vector<std::string> errors = exchange(error);
  if (rank < 0) return nullptr;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const std::string& text = errors[static_cast<std::size_t>(members[i])];
    if (!text.empty()) throw CommError(fmt::format("rank {}: {}", i, text));
  }
  segment->close_descriptor();
  return segment;
}

BoardMemory ShmSegment::board(const std::shared_ptr<ShmSegment>& segment) {
  return {reinterpret_cast<BoardHead*>(segment->base_ + segment->board_at_),
          reinterpret_cast<RankBoard*>(segment->base_ + segment->ranks_at_), segment, true};
}

ChannelMemory ShmSegment::channels() const {
  return {reinterpret_cast<Channel*>(base_ + channels_at_), base_ + channel_slots_at_, layout_.chunk_bytes};
}

}  // namespace phalanx
