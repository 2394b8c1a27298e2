// The collectives where the ranks access each other's buffers in place, so nothing is copied through slots. Threads
// always can (local_backend.h). Processes can if the buffers are in shared memory (shm_windows.h).
//
// All of it happens between two rounds (round_operation.h): the first says where the buffers are, the second that the
// rank has done its part and no longer accesses its peers'. Each rank works alone, and no two write to the same place:
//
//   all_reduce       reduces its slice of all tensors, in rank order, and writes the result to every rank. No other rank
//                    accesses that slice, so results may replace inputs in place
//   reduce           the same, and writes the result to root
//   reduce_scatter   reduces its part of all inputs, in rank order, into its output
//   broadcast        copies root's tensor. Root has nothing to fetch, so it writes a share of each other rank's tensor,
//                    as large as the shares that those fetch
//   the others       copies what it takes (collective_parts.h) out of its peers' buffers
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/slices.h"

namespace phalanx {

/// A rank's buffers, as addresses in this rank's process.
struct RankBuffers {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;                               // all_reduce, reduce, broadcast
  const std::vector<std::int64_t>* input_counts = nullptr;   // uneven all_to_all
  const std::vector<std::int64_t>* output_counts = nullptr;  // uneven all_to_all
};

/// One rank's part of one collective.
class DirectCollective {
 public:
  /// REQUIRES: the description outlives this. ranks[r]: the buffers of rank r.
  DirectCollective(const OperationDescription& description, int rank, std::vector<RankBuffers> ranks);
  /// Does a bounded piece of the work. True: all is done.
  bool advance();
  /// Why there is nothing to do; the same on all ranks. Empty: no error. It may be thrown once no peer reads our
  /// description any more.
  const std::string& error() const { return error_; }

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };

  int size() const { return static_cast<int>(ranks_.size()); }
  const RankBuffers& of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  void plan_reduction();
  void plan_broadcast();
  void plan_parts();
  void plan_copy(std::byte* to, const std::byte* from, std::size_t bytes);
  void copy_piece();
  void reduce_piece();

  const OperationDescription& d_;
  const int rank_;
  const std::vector<RankBuffers> ranks_;
  const std::size_t width_;
  std::string error_;
  std::vector<Copy> copies_;
  std::size_t next_copy_ = 0;
  std::size_t streamed_left_ = 0;  // bytes
  // Elements `range_` of sources_ are reduced into target_, and copied to `also_`.
  Range range_;
  std::vector<const std::byte*> sources_;  // of element 0
  std::byte* target_ = nullptr;            // of element 0
  std::vector<std::byte*> also_;           // of element 0
  std::vector<const void*> inputs_;
};

}  // namespace phalanx
