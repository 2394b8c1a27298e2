// Collectives in which the ranks access each other's buffers in place, so nothing is copied through slots. Threads
// always can (local_backend.cc). Processes can if the buffers are in shared memory (shm_windows.h).
//
// An operation has two rounds (control_block.h). In the first the ranks compare signatures and learn where the others'
// buffers are. Then each rank does its part of the work. It copies what it needs out of its peers' buffers. For a
// reduction it reduces its own slice and writes the result to every rank that needs it. The second round says that the
// rank is done and needs its peers' buffers no longer.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/backends/local_shm/control_block.h"
#include "phalanx/comm/slices.h"

namespace phalanx {

/// A peer's buffers, as addresses in this rank's process.
struct PeerBuffers {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;                               // all_reduce, reduce, broadcast
  const std::vector<std::int64_t>* input_counts = nullptr;   // uneven all_to_all
  const std::vector<std::int64_t>* output_counts = nullptr;  // uneven all_to_all
};

class DirectOperation : public RoundOperation {
 public:
  using RoundOperation::RoundOperation;
  /// Waits until no peer works on this rank's buffers.
  bool retire() noexcept override;

 protected:
  Progress step() override;
  /// The buffers of each rank. Called once, when all ranks have published the first round.
  virtual std::vector<PeerBuffers> peers() = 0;
  /// This rank no longer accesses the peers' buffers.
  virtual void leave_peers() noexcept {}
  /// After a failure: true for a peer that will not report completion, because it died or is stopped. A stopped peer
  /// may continue its piece later.
  virtual bool has_ended(int) const noexcept { return false; }
  /// True once a second has passed since the first call.
  bool has_timed_out();

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };

  std::size_t width() const { return element_size(description_.dtype); }
  void plan();
  void plan_copies();
  void plan_copy(std::byte* to, const std::byte* from, std::size_t elements);
  bool work();  // does a bounded piece of it; true: all is done
  void copy_piece();
  void reduce_piece();

  std::vector<PeerBuffers> peers_;
  bool is_planned_ = false;
  bool is_work_done_ = false;
  bool is_alone_ = false;  // when it failed, some rank had not arrived
  std::optional<std::chrono::steady_clock::time_point> retiring_since_;
  std::string error_;  // thrown only when no peer reads our description any more
  std::vector<Copy> copies_;
  std::size_t streamed_left_ = 0;  // bytes
  std::size_t next_copy_ = 0;
  // Elements `range_` of sources_ are reduced into target_, and copied to `also_`.
  Range range_;
  std::vector<const std::byte*> sources_;  // of element 0
  std::byte* target_ = nullptr;            // of element 0
  std::vector<std::byte*> also_;           // of element 0
  std::vector<const void*> inputs_;
};

}  // namespace phalanx
