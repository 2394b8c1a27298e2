#include "phalanx/comm/backends/local_shm/p2p_channels.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"
#include "phalanx/comm/futex.h"
#include "phalanx/comm/stream_copy.h"

namespace phalanx {

P2PChannels::P2PChannels(ControlBlock& control_block, ChannelMemory memory)
    : control_block_(control_block),
      memory_(memory),
      send_queues_(static_cast<std::size_t>(control_block.size())),
      recv_queues_(static_cast<std::size_t>(control_block.size())) {
  control_block.set_stall_reason([this](int peer) { return stall_reason(peer); });
}

// A rank executes its operations in order. If it has a message for this rank, or waits for one, that this rank would
// serve only after this collective, it will not arrive. The counters are read before its round number
// (RoundOperation::check_peers).
std::string P2PChannels::stall_reason(int peer) const {
  const std::uint32_t sent = channel(peer, control_block_.rank()).sent.load(std::memory_order_acquire);
  if (sent != recv_queues_[static_cast<std::size_t>(peer)].received)
    return fmt::format("rank {} sends a message to rank {}", control_block_.name_of(peer),
                       control_block_.name_of(control_block_.rank()));
  if (channel(control_block_.rank(), peer).receiver_waiting.load(std::memory_order_acquire) != 0)
    return fmt::format("rank {} waits to receive a message from rank {}", control_block_.name_of(peer),
                       control_block_.name_of(control_block_.rank()));
  return {};
}

// True once no peer reads or will read the part's buffer.
bool P2PChannels::revoke(const Part& part) noexcept {
  if (memory_.chunk_bytes != 0 || !part.transfer->is_send || !part.all_posted || part.is_done) return true;
  Channel& to = channel(control_block_.rank(), part.transfer->peer);
  std::uint32_t claim = 0;
  if (to.claims[(part.last_entry - 1) % kChannelEntries].compare_exchange_strong(claim, 2, std::memory_order_acq_rel) ||
      claim == 2)
    return true;
  return static_cast<std::int32_t>(to.received.load(std::memory_order_acquire) - part.last_entry) >= 0;
}

std::byte* P2PChannels::slot(int source, int destination, std::uint32_t entry) const {
  const auto size = static_cast<std::size_t>(control_block_.size());
  const auto channel_index = static_cast<std::size_t>(source) * size + static_cast<std::size_t>(destination);
  return memory_.slots + (channel_index * kChannelEntries + entry % kChannelEntries) * memory_.chunk_bytes;
}

void P2PChannels::post(Part& part) {
  const auto peer = static_cast<std::size_t>(part.transfer->peer);
  (part.transfer->is_send ? send_queues_[peer].posted : recv_queues_[peer].posted).push_back(&part);
}

void P2PChannels::cancel(Part& part) {
  const auto peer = static_cast<std::size_t>(part.transfer->peer);
  std::erase(part.transfer->is_send ? send_queues_[peer].posted : recv_queues_[peer].posted, &part);
  if (recv_queues_[peer].current == &part) recv_queues_[peer].current = nullptr;
}

bool P2PChannels::move_sends(int destination) {
  SendQueue& box = send_queues_[static_cast<std::size_t>(destination)];
  if (box.posted.empty()) return false;
  Channel& to = channel(control_block_.rank(), destination);
  const std::uint32_t received = to.received.load(std::memory_order_acquire);
  PHALANX_ASSERT(box.sent - received <= kChannelEntries, "the destination overtook the source");
  bool moved = false;
  for (Part* part : box.posted) {
    while (!part->all_posted && box.sent - received < kChannelEntries) {
      const std::size_t bytes =
          memory_.chunk_bytes == 0 ? part->bytes : std::min(memory_.chunk_bytes, part->bytes - part->moved);
      ChannelEntry& entry = to.entries[box.sent % kChannelEntries];
      entry = {nullptr, part->transfer->count, bytes, part->transfer->tag, part->transfer->dtype, part->moved == 0};
      const auto* data = static_cast<const std::byte*>(part->transfer->data) + part->moved;
      if (memory_.chunk_bytes == 0)
        entry.data = data;
      else if (bytes > 0)
        std::memcpy(slot(control_block_.rank(), destination, box.sent), data, bytes);
      part->moved += bytes;
      part->all_posted = part->moved == part->bytes;
      to.claims[box.sent % kChannelEntries].store(0, std::memory_order_relaxed);
      part->last_entry = ++box.sent;
      to.sent.store(box.sent, std::memory_order_release);
      ring(control_block_.of(destination).channel_signal, control_block_.of(destination).channel_sleepers,
           control_block_.process_shared());
      moved = true;
    }
    if (!part->all_posted) break;
  }
  while (!box.posted.empty() && box.posted.front()->all_posted &&
         static_cast<std::int32_t>(received - box.posted.front()->last_entry) >= 0) {
    box.posted.front()->is_done = true;
    box.posted.pop_front();
    moved = true;
  }
  return moved;
}

void P2PChannels::require_match(int source, const ChannelEntry& head, const Transfer& receive) const {
  if (head.dtype == receive.dtype && head.count == receive.count) return;
  throw CommError(fmt::format("the message does not match (tag {}): rank {} sends {}[{}]; rank {} receives {}[{}]",
                              head.tag, control_block_.name_of(source), name_of(head.dtype), head.count,
                              control_block_.name_of(control_block_.rank()), name_of(receive.dtype), receive.count));
}

bool P2PChannels::deliver_unexpected(int source) {
  RecvQueue& box = recv_queues_[static_cast<std::size_t>(source)];
  bool moved = false;
  for (std::size_t i = 0; i < box.posted.size() && !box.unexpected.empty();) {
    Part* part = box.posted[i];
    const auto message = std::ranges::find_if(
        box.unexpected, [&](const Message& m) { return m.is_complete() && m.head.tag == part->transfer->tag; });
    if (part->is_matched || message == box.unexpected.end()) {
      ++i;
      continue;
    }
    require_match(source, message->head, *part->transfer);
    if (part->bytes > 0) std::memcpy(part->transfer->data, message->bytes.data(), part->bytes);
    part->is_done = true;
    box.posted.erase(box.posted.begin() + static_cast<std::ptrdiff_t>(i));
    box.unexpected.erase(message);
    moved = true;
  }
  return moved;
}

void P2PChannels::start_message(int source, const ChannelEntry& entry) {
  RecvQueue& box = recv_queues_[static_cast<std::size_t>(source)];
  const auto found = std::ranges::find_if(
      box.posted, [&](const Part* part) { return !part->is_matched && part->transfer->tag == entry.tag; });
  if (found != box.posted.end()) {
    require_match(source, entry, *(*found)->transfer);
    (*found)->is_matched = true;
    box.current = *found;
    return;
  }
  Message& message = box.unexpected.emplace_back();
  message.head = entry;
  message.bytes.resize(static_cast<std::size_t>(entry.count) * element_size(entry.dtype));
  box.current_unexpected = &message;
}

bool P2PChannels::move_receives(int source) {
  RecvQueue& box = recv_queues_[static_cast<std::size_t>(source)];
  if (box.posted.empty()) return false;
  Channel& from = channel(source, control_block_.rank());
  bool moved = box.unexpected.empty() ? false : deliver_unexpected(source);
  const std::uint32_t sent = from.sent.load(std::memory_order_acquire);
  PHALANX_ASSERT(sent - box.received <= kChannelEntries, "the source overwrote entries that nobody has read");
  while (box.received != sent && !box.posted.empty()) {
    const ChannelEntry& entry = from.entries[box.received % kChannelEntries];
    if (box.is_receiver_waiting) {
      box.is_receiver_waiting = false;
      from.receiver_waiting.store(0, std::memory_order_release);
    }
    // The message is under way already if the claim below failed before.
    if (entry.is_first && box.current == nullptr && box.current_unexpected == nullptr) start_message(source, entry);
    // After everything that may throw: a claimed entry must be received.
    if (memory_.chunk_bytes == 0) {
      std::uint32_t claim = 0;
      if (!from.claims[box.received % kChannelEntries].compare_exchange_strong(claim, 1, std::memory_order_acq_rel))
        break;
    }
    const std::byte* data = memory_.chunk_bytes == 0 ? static_cast<const std::byte*>(entry.data)
                                                     : slot(source, control_block_.rank(), box.received);
    if (Part* part = box.current) {
      std::byte* to = static_cast<std::byte*>(part->transfer->data) + part->moved;
      if (part->bytes >= kStreamBytes)
        stream_copy(to, data, entry.bytes);
      else if (entry.bytes > 0)
        std::memcpy(to, data, entry.bytes);
      part->moved += entry.bytes;
      PHALANX_ASSERT(part->moved <= part->bytes, "a message is longer than its first entry said");
      if (part->moved == part->bytes) {
        part->is_done = true;
        std::erase(box.posted, part);
        box.current = nullptr;
      }
    } else if (Message* message = box.current_unexpected) {
      if (entry.bytes > 0) std::memcpy(message->bytes.data() + message->moved, data, entry.bytes);
      message->moved += entry.bytes;
      if (message->is_complete()) box.current_unexpected = nullptr;
    }
    from.received.store(++box.received, std::memory_order_release);
    ring(control_block_.of(source).channel_signal, control_block_.of(source).channel_sleepers,
         control_block_.process_shared());
    moved = true;
  }
  if (!moved && !box.is_receiver_waiting && box.received == sent) {
    box.is_receiver_waiting = true;
    from.receiver_waiting.store(1, std::memory_order_release);
  }
  return moved;
}

P2POperation::P2POperation(P2PChannels& channels, const OperationDescription& description) : channels_(channels) {
  channels.control_block_.throw_if_aborted();
  parts_.reserve(description.transfers.size());
  for (const Transfer& transfer : description.transfers) {
    Part part;
    part.transfer = &transfer;
    part.bytes = static_cast<std::size_t>(transfer.count) * element_size(transfer.dtype);
    parts_.push_back(part);
  }
  for (Part& part : parts_) channels_.post(part);
}

P2POperation::~P2POperation() {
  for (Part& part : parts_)
    if (!part.is_done) channels_.cancel(part);
}

Progress P2POperation::advance() {
  // Read first, so that any later change makes the doorbell's value stale.
  channel_signal_seen_ =
      channels_.control_block_.of(channels_.control_block_.rank()).channel_signal.load(std::memory_order_seq_cst);
  bool moved = false;
  bool done = true;
  for (Part& part : parts_) {
    if (!part.is_done)
      moved |= part.transfer->is_send ? channels_.move_sends(part.transfer->peer)
                                      : channels_.move_receives(part.transfer->peer);
    done &= part.is_done;
  }
  if (done) return Progress::done;
  if (moved) return Progress::moved;
  channels_.control_block_.throw_if_aborted();
  return Progress::blocked;
}

std::optional<Doorbell> P2POperation::doorbell() {
  RankControlBlock& mine = channels_.control_block_.of(channels_.control_block_.rank());
  return Doorbell{&mine.channel_signal, channel_signal_seen_, &mine.channel_sleepers,
                  channels_.control_block_.process_shared()};
}

bool P2POperation::retire() noexcept {
  bool all = true;
  for (const Part& part : parts_) all &= channels_.revoke(part);
  return all;
}

std::vector<int> P2POperation::missing_ranks() {
  std::vector<int> missing;
  for (const Part& part : parts_)
    if (!part.is_done) missing.push_back(part.transfer->peer);
  std::ranges::sort(missing);
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  return missing;
}

void P2POperation::check_peers() {
  for (int peer : missing_ranks()) {
    const std::string why = channels_.control_block_.death_reason(peer);
    if (why.empty()) continue;
    // What the peer did just before it ended still counts.
    const bool sent = channels_.move_sends(peer), received = channels_.move_receives(peer);
    if (sent || received) continue;
    channels_.control_block_.throw_if_aborted();  // a rank that failed wrote its reason before it ended
    channels_.control_block_.throw_dead(peer, why);
  }
}

}  // namespace phalanx
