// The memory that the ranks of an shm group share (shared_pages.h): their control block, the slots of the collectives
// and the channels of point-to-point messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "phalanx/comm/backends/local_shm/control_block.h"
#include "phalanx/comm/backends/local_shm/p2p_channels.h"
#include "phalanx/comm/backends/local_shm/shared_pages.h"

namespace phalanx {

struct ShmLayout {
  int size = 0;
  std::size_t slot_bytes = 0;   // kBuffers per rank
  std::size_t chunk_bytes = 0;  // kChannelEntries per ordered pair of ranks
};

class ShmSegment {
 public:
  using Exchange = SharedPages::Exchange;

  /// Collective over the ranks of `exchange`. members[0] makes the segment for the layout.size members. A rank in no
  /// group (rank < 0) takes part in the exchanges (two) and gets nullptr.
  static std::shared_ptr<ShmSegment> make(const ShmLayout& layout, const std::vector<int>& members, int rank,
                                          const Exchange& exchange);

  static ControlBlockMemory control_block(const std::shared_ptr<ShmSegment>& segment);
  ChannelMemory channels() const;
  const ShmLayout& layout() const { return layout_; }
  std::byte* slot(int rank, std::uint64_t round) const {
    return slots_ + (static_cast<std::size_t>(rank) * kBuffers + round % kBuffers) * layout_.slot_bytes;
  }

 private:
  explicit ShmSegment(const ShmLayout& layout);

  ShmLayout layout_;
  std::shared_ptr<SharedPages> pages_;
  std::size_t bytes_ = 0;
  std::size_t ranks_at_ = 0;
  std::size_t channels_at_ = 0;
  std::size_t slots_at_ = 0;
  std::size_t channel_slots_at_ = 0;
  std::byte* slots_ = nullptr;
};

}  // namespace phalanx
