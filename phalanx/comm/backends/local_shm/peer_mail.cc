#include "phalanx/comm/backends/local_shm/peer_mail.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/comm/futex.h"
#include "phalanx/comm/stream_copy.h"

namespace phalanx {

PeerMail::PeerMail(Board& board, ChannelMemory memory)
    : board_(board),
      memory_(memory),
      outboxes_(static_cast<std::size_t>(board.size())),
      inboxes_(static_cast<std::size_t>(board.size())) {
  board.set_why_stuck([this](int peer) { return why_stuck(peer); });
}

// A rank finishes what it has been told to do in order, so one that has a message for us, or waits for one, that this
// collective stands before will not come. Its words are read before its round number (RoundOperation::check_peers).
std::string PeerMail::why_stuck(int peer) const {
  const std::uint32_t sent = channel(peer, board_.rank()).sent.load(std::memory_order_acquire);
  if (sent != inboxes_[static_cast<std::size_t>(peer)].taken)
    return fmt::format("rank {} sends a message to rank {}", board_.name_of(peer), board_.name_of(board_.rank()));
  if (channel(board_.rank(), peer).wanted.load(std::memory_order_acquire) != 0)
    return fmt::format("rank {} waits to receive a message from rank {}", board_.name_of(peer),
                       board_.name_of(board_.rank()));
  return {};
}

// True once no peer reads or will read the part's buffer.
bool PeerMail::revoke(const Part& part) noexcept {
  if (memory_.chunk_bytes != 0 || !part.transfer->is_send || !part.all_posted || part.is_done) return true;
  Channel& to = channel(board_.rank(), part.transfer->peer);
  std::uint32_t claim = 0;
  if (to.claims[(part.last_entry - 1) % kChannelEntries].compare_exchange_strong(claim, 2, std::memory_order_acq_rel) ||
      claim == 2)
    return true;
  return static_cast<std::int32_t>(to.taken.load(std::memory_order_acquire) - part.last_entry) >= 0;
}

std::byte* PeerMail::slot(int source, int destination, std::uint32_t entry) const {
  const auto channel_index = static_cast<std::size_t>(source * board_.size() + destination);
  return memory_.slots + (channel_index * kChannelEntries + entry % kChannelEntries) * memory_.chunk_bytes;
}

void PeerMail::post(Part& part) {
  const auto peer = static_cast<std::size_t>(part.transfer->peer);
  (part.transfer->is_send ? outboxes_[peer].posted : inboxes_[peer].posted).push_back(&part);
}

void PeerMail::withdraw(Part& part) {
  const auto peer = static_cast<std::size_t>(part.transfer->peer);
  std::erase(part.transfer->is_send ? outboxes_[peer].posted : inboxes_[peer].posted, &part);
  if (inboxes_[peer].current == &part) inboxes_[peer].current = nullptr;
}

bool PeerMail::move_sends(int destination) {
  Outbox& box = outboxes_[static_cast<std::size_t>(destination)];
  if (box.posted.empty()) return false;
  Channel& to = channel(board_.rank(), destination);
  const std::uint32_t taken = to.taken.load(std::memory_order_acquire);
  bool moved = false;
  for (Part* part : box.posted) {
    while (!part->all_posted && box.sent - taken < kChannelEntries) {
      const std::size_t bytes =
          memory_.chunk_bytes == 0 ? part->bytes : std::min(memory_.chunk_bytes, part->bytes - part->moved);
      ChannelEntry& entry = to.entries[box.sent % kChannelEntries];
      entry = {nullptr, part->transfer->count, bytes, part->transfer->tag, part->transfer->dtype, part->moved == 0};
      const auto* data = static_cast<const std::byte*>(part->transfer->data) + part->moved;
      if (memory_.chunk_bytes == 0)
        entry.data = data;
      else if (bytes > 0)
        std::memcpy(slot(board_.rank(), destination, box.sent), data, bytes);
      part->moved += bytes;
      part->all_posted = part->moved == part->bytes;
      to.claims[box.sent % kChannelEntries].store(0, std::memory_order_relaxed);
      part->last_entry = ++box.sent;
      to.sent.store(box.sent, std::memory_order_release);
      ring(board_.of(destination).mail, board_.of(destination).mail_sleepers, board_.process_shared());
      moved = true;
    }
    if (!part->all_posted) break;
  }
  while (!box.posted.empty() && box.posted.front()->all_posted &&
         static_cast<std::int32_t>(taken - box.posted.front()->last_entry) >= 0) {
    box.posted.front()->is_done = true;
    box.posted.pop_front();
    moved = true;
  }
  return moved;
}

void PeerMail::require_match(int source, const ChannelEntry& head, const Transfer& receive) const {
  if (head.dtype == receive.dtype && head.count == receive.count) return;
  throw CommError(fmt::format("the message does not match (tag {}): rank {} sends {}[{}]; rank {} receives {}[{}]",
                              head.tag, board_.name_of(source), name_of(head.dtype), head.count,
                              board_.name_of(board_.rank()), name_of(receive.dtype), receive.count));
}

bool PeerMail::deliver_aside(int source) {
  Inbox& box = inboxes_[static_cast<std::size_t>(source)];
  bool moved = false;
  for (std::size_t i = 0; i < box.posted.size() && !box.aside.empty();) {
    Part* part = box.posted[i];
    const auto message = std::ranges::find_if(
        box.aside, [&](const Message& m) { return m.is_complete() && m.head.tag == part->transfer->tag; });
    if (part->is_matched || message == box.aside.end()) {
      ++i;
      continue;
    }
    require_match(source, message->head, *part->transfer);
    if (part->bytes > 0) std::memcpy(part->transfer->data, message->bytes.data(), part->bytes);
    part->is_done = true;
    box.posted.erase(box.posted.begin() + static_cast<std::ptrdiff_t>(i));
    box.aside.erase(message);
    moved = true;
  }
  return moved;
}

void PeerMail::start_message(int source, const ChannelEntry& entry) {
  Inbox& box = inboxes_[static_cast<std::size_t>(source)];
  const auto found = std::ranges::find_if(
      box.posted, [&](const Part* part) { return !part->is_matched && part->transfer->tag == entry.tag; });
  if (found != box.posted.end()) {
    require_match(source, entry, *(*found)->transfer);
    (*found)->is_matched = true;
    box.current = *found;
    return;
  }
  Message& message = box.aside.emplace_back();
  message.head = entry;
  message.bytes.resize(static_cast<std::size_t>(entry.count) * element_size(entry.dtype));
  box.current_aside = &message;
}

bool PeerMail::move_receives(int source) {
  Inbox& box = inboxes_[static_cast<std::size_t>(source)];
  if (box.posted.empty()) return false;
  Channel& from = channel(source, board_.rank());
  bool moved = box.aside.empty() ? false : deliver_aside(source);
  const std::uint32_t sent = from.sent.load(std::memory_order_acquire);
  while (box.taken != sent && !box.posted.empty()) {
    const ChannelEntry& entry = from.entries[box.taken % kChannelEntries];
    if (box.is_wanting) {
      box.is_wanting = false;
      from.wanted.store(0, std::memory_order_release);
    }
    if (entry.is_first) start_message(source, entry);
    // After all that may throw: what is claimed is taken.
    if (memory_.chunk_bytes == 0) {
      std::uint32_t claim = 0;
      if (!from.claims[box.taken % kChannelEntries].compare_exchange_strong(claim, 1, std::memory_order_acq_rel)) break;
    }
    const std::byte* data =
        memory_.chunk_bytes == 0 ? static_cast<const std::byte*>(entry.data) : slot(source, board_.rank(), box.taken);
    if (Part* part = box.current) {
      std::byte* to = static_cast<std::byte*>(part->transfer->data) + part->moved;
      if (part->bytes >= kStreamBytes)
        stream_copy(to, data, entry.bytes);
      else if (entry.bytes > 0)
        std::memcpy(to, data, entry.bytes);
      part->moved += entry.bytes;
      if (part->moved == part->bytes) {
        part->is_done = true;
        std::erase(box.posted, part);
        box.current = nullptr;
      }
    } else if (Message* message = box.current_aside) {
      if (entry.bytes > 0) std::memcpy(message->bytes.data() + message->moved, data, entry.bytes);
      message->moved += entry.bytes;
      if (message->is_complete()) box.current_aside = nullptr;
    }
    from.taken.store(++box.taken, std::memory_order_release);
    ring(board_.of(source).mail, board_.of(source).mail_sleepers, board_.process_shared());
    moved = true;
  }
  if (!moved && !box.is_wanting && box.taken == sent) {
    box.is_wanting = true;
    from.wanted.store(1, std::memory_order_release);
  }
  return moved;
}

PeerOperation::PeerOperation(PeerMail& mail, const OperationDescription& description) : mail_(mail) {
  mail.board_.throw_if_aborted();
  parts_.reserve(description.transfers.size());
  for (const Transfer& transfer : description.transfers) {
    Part part;
    part.transfer = &transfer;
    part.bytes = static_cast<std::size_t>(transfer.count) * element_size(transfer.dtype);
    parts_.push_back(part);
  }
  for (Part& part : parts_) mail_.post(part);
}

PeerOperation::~PeerOperation() {
  for (Part& part : parts_)
    if (!part.is_done) mail_.withdraw(part);
}

Progress PeerOperation::advance() {
  // Read before looking, so that whatever changes afterwards makes the doorbell's value stale.
  mail_seen_ = mail_.board_.of(mail_.board_.rank()).mail.load(std::memory_order_seq_cst);
  bool moved = false;
  bool done = true;
  for (Part& part : parts_) {
    if (!part.is_done)
      moved |=
          part.transfer->is_send ? mail_.move_sends(part.transfer->peer) : mail_.move_receives(part.transfer->peer);
    done &= part.is_done;
  }
  if (done) return Progress::done;
  if (moved) return Progress::moved;
  mail_.board_.throw_if_aborted();
  return Progress::blocked;
}

std::optional<Doorbell> PeerOperation::doorbell() {
  RankBoard& mine = mail_.board_.of(mail_.board_.rank());
  return Doorbell{&mine.mail, mail_seen_, &mine.mail_sleepers, mail_.board_.process_shared()};
}

bool PeerOperation::retire() noexcept {
  bool all = true;
  for (const Part& part : parts_) all &= mail_.revoke(part);
  return all;
}

std::vector<int> PeerOperation::missing_ranks() {
  std::vector<int> missing;
  for (const Part& part : parts_)
    if (!part.is_done) missing.push_back(part.transfer->peer);
  std::ranges::sort(missing);
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  return missing;
}

void PeerOperation::check_peers() {
  for (int peer : missing_ranks()) {
    const std::string why = mail_.board_.why_dead(peer);
    if (why.empty()) continue;
    // What it did just before it ended still counts.
    const bool moved = mail_.move_sends(peer) | mail_.move_receives(peer);
    if (moved) continue;
    mail_.board_.throw_if_aborted();  // a rank that failed wrote its reason before it ended
    throw CommError(fmt::format("rank {} {}", mail_.board_.name_of(peer), why));
  }
}

}  // namespace phalanx
