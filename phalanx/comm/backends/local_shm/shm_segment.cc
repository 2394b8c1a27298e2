#include "phalanx/comm/backends/local_shm/shm_segment.h"

#include <utility>

namespace phalanx {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t to_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

ShmSegment::ShmSegment(const ShmLayout& layout) : layout_(layout) {
  const auto n = static_cast<std::size_t>(layout.size);
  ranks_at_ = to_pages(sizeof(ControlBlockHeader));
  channels_at_ = ranks_at_ + to_pages(n * sizeof(RankControlBlock));
  slots_at_ = channels_at_ + to_pages(n * n * sizeof(Channel));
  channel_slots_at_ = slots_at_ + to_pages(n * kBuffers * layout.slot_bytes);
  bytes_ = channel_slots_at_ + to_pages(n * n * kChannelEntries * layout.chunk_bytes);
}

std::shared_ptr<ShmSegment> ShmSegment::make(const ShmLayout& layout, const std::vector<int>& members, int rank,
                                             const Exchange& exchange) {
  std::shared_ptr<ShmSegment> segment(new ShmSegment(layout));
  SharedPages::Request request;
  request.bytes = segment->bytes_;
  request.form = {static_cast<std::uint64_t>(layout.size), layout.slot_bytes, layout.chunk_bytes};
  request.members = members;
  request.rank = rank;
  request.prepare = [&](SharedPages& pages) {
    if (rank == 0) pages.take(0, segment->channels_at_);  // what every rank uses
  };
  segment->pages_ = SharedPages::make(std::move(request), exchange);
  if (!segment->pages_) return nullptr;
  segment->slots_ = segment->pages_->data() + segment->slots_at_;
  return segment;
}

ControlBlockMemory ShmSegment::control_block(const std::shared_ptr<ShmSegment>& segment) {
  std::byte* data = segment->pages_->data();
  return {reinterpret_cast<ControlBlockHeader*>(data), reinterpret_cast<RankControlBlock*>(data + segment->ranks_at_),
          segment, true};
}

ChannelMemory ShmSegment::channels() const {
  return {reinterpret_cast<Channel*>(pages_->data() + channels_at_), pages_->data() + channel_slots_at_,
          layout_.chunk_bytes};
}

}  // namespace phalanx
