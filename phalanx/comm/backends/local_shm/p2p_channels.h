// Point-to-point messages of the local and the shm backend.
//
// For every ordered pair of ranks there is a Channel: a ring of kChannelEntries entries with two counters. The source
// counts the entries sent, the destination counts the entries received. A message is one or more entries; the first
// carries its type, length and tag. In shared memory an entry has a slot of chunk_bytes, which the source fills and the
// destination copies out. Between threads chunk_bytes is 0 and an entry is the source's pointer, so there is one copy
// in all.
//
// - A send is done when the destination has received all of it. So a mismatch is an error on both sides.
// - Messages of a pair match receives by tag, in issue order. A message whose tag is not requested yet may arrive
//   before one that is. The destination then stores it in its own memory, as MPI does with unexpected messages.
// - Ordering: `sent` is stored (release) after the entry and its slot are written, and loaded (acquire) before they are
//   read. `received` is stored (release) after they were read, and loaded (acquire) before they are written again. Each
//   change also changes the other rank's channel_signal, the one word on which a rank sleeps whatever it waits for.
// - Between threads the destination claims an entry before it reads the source's buffer. A source that fails revokes
//   what is not claimed and waits for what is. So no buffer is read after its operation has ended.
// - `receiver_waiting` is 1 while the destination waits for a message and has received all that were sent. It is
//   cleared before `received` moves, so a source that is past its sends never sees an old 1.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "phalanx/comm/backends/local_shm/control_block.h"

namespace phalanx {

inline constexpr std::uint32_t kChannelEntries = 4;

struct ChannelEntry {
  const void* data = nullptr;  // chunk_bytes == 0 only
  std::int64_t count = 0;      // elements of the whole message
  std::uint64_t bytes = 0;     // in this entry
  std::int32_t tag = 0;
  DataType dtype = DataType::u8;
  bool is_first = false;
};

struct alignas(kCacheLine) Channel {
  alignas(kCacheLine) std::atomic<std::uint32_t> sent;
  alignas(kCacheLine) std::atomic<std::uint32_t> received;
  std::atomic<std::uint32_t> receiver_waiting;
  alignas(kCacheLine) std::array<ChannelEntry, kChannelEntries> entries;
  std::array<std::atomic<std::uint32_t>, kChannelEntries>
      claims;  // chunk_bytes == 0 only: 0 sent, 1 claimed, 2 revoked
};

struct ChannelMemory {
  Channel* channels = nullptr;  // [source * size + destination]
  std::byte* slots = nullptr;   // [source * size + destination][kChannelEntries][chunk_bytes]
  std::size_t chunk_bytes = 0;
};

class P2PChannels;

/// send, recv or batch_isend_irecv.
class P2POperation final : public Operation {
 public:
  P2POperation(P2PChannels& channels, const OperationDescription& description);
  ~P2POperation() override;
  Progress advance() override;
  std::optional<Doorbell> doorbell() override;
  void check_peers() override;
  std::vector<int> missing_ranks() override;
  bool retire() noexcept override;

 private:
  friend class P2PChannels;
  struct Part {
    const Transfer* transfer = nullptr;
    std::size_t bytes = 0;
    std::size_t moved = 0;
    std::uint32_t last_entry = 0;  // send: the value of `received` to wait for
    bool all_posted = false;       // send
    bool is_matched = false;       // recv
    bool is_done = false;
  };
  P2PChannels& channels_;
  std::vector<Part> parts_;
  std::uint32_t channel_signal_seen_ = 0;
};

/// One rank's side of all its channels.
class P2PChannels {
 public:
  P2PChannels(ControlBlock& control_block, ChannelMemory memory);

 private:
  friend class P2POperation;
  using Part = P2POperation::Part;
  struct Message {  // arrived before it was requested
    ChannelEntry head;
    std::size_t moved = 0;
    std::vector<std::byte> bytes;
    bool is_complete() const { return moved == bytes.size(); }
  };
  struct SendQueue {
    std::deque<Part*> posted;  // in order; the front ones may be fully sent and not yet received
    std::uint32_t sent = 0;
  };
  struct RecvQueue {
    std::deque<Part*> posted;
    std::deque<Message> unexpected;
    bool is_receiver_waiting = false;
    Part* current = nullptr;                // receives the message under way,
    Message* current_unexpected = nullptr;  // or this does
    std::uint32_t received = 0;
  };

  void post(Part& part);
  void cancel(Part& part);
  bool move_sends(int destination);
  bool revoke(const Part& part) noexcept;
  std::string stall_reason(int peer) const;
  bool move_receives(int source);
  bool deliver_unexpected(int source);
  void start_message(int source, const ChannelEntry& entry);
  void require_match(int source, const ChannelEntry& head, const Transfer& receive) const;
  Channel& channel(int source, int destination) const {
    return memory_.channels[source * control_block_.size() + destination];
  }
  std::byte* slot(int source, int destination, std::uint32_t entry) const;

  ControlBlock& control_block_;
  ChannelMemory memory_;
  std::vector<SendQueue> send_queues_;
  std::vector<RecvQueue> recv_queues_;
};

}  // namespace phalanx
