// The memory that the ranks of one machine share.
//
// The first rank makes a memfd (no name in any file system, mode 0600, sealed against shrinking), publishes its process
// id and descriptor, and every other rank opens it through /proc/<pid>/fd. A random token inside proves that the right
// memory was opened. The descriptor is closed as soon as all have mapped it, so nothing is left behind however a rank
// ends: the kernel frees the memory with the last mapping. Pages are taken only when touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/board.h"
#include "phalanx/comm/peer_mail.h"

namespace phalanx {

struct ShmLayout {
  int size = 0;
  std::size_t slot_bytes = 0;   // kBuffers per rank
  std::size_t chunk_bytes = 0;  // kChannelEntries per ordered pair of ranks
};

class ShmSegment {
 public:
  /// all_gather(value): every rank's value. It is called twice by every rank, or throws. On one of them failing, all
  /// do.
  using Exchange = std::function<std::vector<std::string>(const std::string&)>;

  /// Collective over the ranks behind `exchange`. members[0] of them makes the segment for the layout.size members;
  /// a rank that is in no group (rank < 0) takes part in the exchanges and gets nullptr.
  static std::shared_ptr<ShmSegment> make(const ShmLayout& layout, const std::vector<int>& members, int rank,
                                          const Exchange& exchange);
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  static BoardMemory board(const std::shared_ptr<ShmSegment>& segment);
  ChannelMemory channels() const;
  const ShmLayout& layout() const { return layout_; }
  std::byte* slot(int rank, std::uint64_t round) const {
    return slots_ + (static_cast<std::size_t>(rank) * kBuffers + round % kBuffers) * layout_.slot_bytes;
  }

 private:
  explicit ShmSegment(const ShmLayout& layout);
  void create();                          // memfd, mapping, token
  void open(const std::string& address);  // of a segment that another process made
  void map(int descriptor);
  void close_descriptor();

  ShmLayout layout_;
  int descriptor_ = -1;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::string address_;
  std::size_t board_at_ = 0;
  std::size_t ranks_at_ = 0;
  std::size_t channels_at_ = 0;
  std::size_t channel_slots_at_ = 0;
  std::byte* slots_ = nullptr;
};

}  // namespace phalanx
