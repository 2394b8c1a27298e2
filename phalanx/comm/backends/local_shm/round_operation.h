// RoundOperation: drives one collective of the local or the shm backend, round by round. This page is the protocol of
// the memory that the ranks share.
//
// ROUNDS. A collective is a sequence of rounds. Their numbers continue from one collective to the next, and all ranks
// agree on them, because the signature in a collective's first round says how many it has. In a round a rank waits for
// its peers, does a bounded piece of work, and publishes the round's number. One word does two things: it says that the
// rank has written what peers need of this round, and it acknowledges what the rank has read of earlier ones.
//
//       rank 0                                   rank 1
//       await rank 1: t - 1                      await rank 0: t - 1
//       write into slot t mod 3                  write into slot t mod 3
//       publish t ------------------.   .------- publish t                     (ControlBlock::publish)
//       read rank 1's slot of t - 1  \ /         read rank 0's slot of t - 1
//                                     X
//       await rank 1: t  <-----------' `-------> await rank 0: t               (ControlBlock::reached)
//       write into slot t + 1 mod 3              write into slot t + 1 mod 3
//
// WHY IT IS SAFE. Each rank has three slots and three headers; what it writes for round t goes into number t mod 3.
//   1. A rank reads its peers' data of round t only after they published t, and before it publishes t + 2 itself.
//   2. A rank writes its data of round t only after every peer published t - 1.
// Round t overwrites the data of t - 3. By rule 2 every peer has then published t - 1 = (t - 3) + 2, so by rule 1 none
// of them reads those data any more. The rules hold across collectives, so none needs a barrier at its end. Debug
// builds check both rules at each use of a slot (slot_rounds.cc). control_block.h states the memory ordering.
//
// FIRST ROUND. Every rank writes its signature into its header. Nobody goes on before it has seen all of them and found
// them equal. A difference is an error on every rank, before data moved.
//
// PATHS. collective_rounds.h tells what happens in each round. There are two ways.
//   slots     (shm) Data are copied through the ranks' slots.
//   direct    (local, shm) Ranks read and write each other's buffers in place. There are two rounds. By the first a
//             rank lets its peers use its buffers; the second says that it has done its part and no longer uses theirs.
// Threads go the direct way. A process can if the data that peers would read (the input; for broadcast, all_reduce and
// reduce the output) are in a window (shm_windows.h). Its header says where. If all ranks name the same window, they go
// the direct way. If none names one, slots: the first round has carried data already. Otherwise they start again with
// slots, one round later.
//
// FAILURES. abort() writes one reason for the whole group, once. A rank that waits in vain sees it and throws. A rank
// that has seen all it waits for finishes, even if the group is aborted by then. A rank that waits asks every 100 ms
// whether the awaited one has died (check_peers); the death is an error unless it published
// what is awaited just before.
//   On the slots, peers never touch this rank's buffers, so a failed operation may end at once.
//   On the direct path they may still write into them. A rank that fails publishes the second round without having done
// its part and says so (ControlBlock::leave). It then waits (retire) until every peer has published that round, or is
// known never to begin, or has ended. A peer that was stopped may continue at any time: after a second it is given up,
// and the memory is abandoned instead of being reused.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "phalanx/comm/backends/local_shm/collective_rounds.h"
#include "phalanx/comm/backends/local_shm/control_block.h"
#include "phalanx/comm/backends/local_shm/shm_segment.h"
#include "phalanx/comm/backends/local_shm/shm_windows.h"

namespace phalanx {

/// Any collective verb.
class RoundOperation final : public Operation {
 public:
  /// Of threads, which access each other's memory.
  RoundOperation(ControlBlock& control_block, const OperationDescription& description);
  /// Of processes.
  RoundOperation(ControlBlock& control_block, const OperationDescription& description, const ShmSegment& segment,
                 ShmWindows& windows);

  Progress advance() override;
  std::optional<Doorbell> doorbell() override;
  void check_peers() override;
  std::vector<int> missing_ranks() override;
  bool retire() noexcept override;

 private:
  enum class State : std::uint8_t { first_round, compare, again, rounds };
  enum class Windows : std::uint8_t { none, some, one };  // where all ranks' data are, as their headers say

  // Steps of advance().
  Progress step();
  Progress step_rounds();
  void publish_first_round();
  void compare_signatures();
  void choose_path();
  void start_slots();
  bool is_direct() const { return !segment_ || window_; }
  Windows windows() const;
  std::vector<RankBuffers> buffers() const;

  // rank: kAll, or this rank itself: none. False: records who is awaited; advance() should then return blocked.
  bool await(int rank, std::uint64_t round);
  bool has_timed_out();  // true once a second has passed since the first call

  ControlBlock& control_block_;
  const OperationDescription& description_;
  const ShmSegment* segment_ = nullptr;  // null: threads
  std::shared_ptr<ShmWindow> window_;    // processes: where this rank's data are, on the direct path
  std::size_t offset_ = 0;               // of the data in the window

  State state_ = State::first_round;
  std::uint64_t first_round_;
  int awaited_ = -1;
  std::uint64_t awaited_round_ = 0;

  RoundsHolder rounds_;
  std::size_t next_ = 1;  // the round to publish next, counted from the first

  // The direct path.
  bool peers_use_buffers_ = false;  // then it ends only when they have said that they no longer do
  bool is_alone_ = false;           // when it failed, some rank had not arrived
  std::optional<std::chrono::steady_clock::time_point> waits_since_;
};

}  // namespace phalanx
