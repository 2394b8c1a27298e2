// TwoLevelBackend: a backend for the ranks of one machine (`inner`, shm) and one for all ranks (`flat`, gloo or mpi),
// put together; see two_level.h for what it promises. Torch-free.
//
// A collective is a list of steps (two_level_steps.h). It begins with a barrier inside the machine and, at the same
// time, the flat backend's comparison of the real description, which moves no data (compare_only): the first finds
// ranks of this machine that are in a message instead, the second every other mismatch. Or, where that is as good, the
// flat backend does it all. Messages of a rank go through inner or flat by where the peer is.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/hierarchical/two_level.h"
#include "phalanx/comm/hierarchical/two_level_layout.h"

namespace phalanx {

/// Of the messages that collectives are made of; users may have the other tags. Small enough for every MPI that has
/// been met.
inline constexpr int kTwoLevelTag = 2'000'000;

class TwoLevelBackend final : public Backend {
 public:
  struct Tuning {
    std::int64_t smallest_bytes = 0;
    bool by_estimate = true;
    std::int64_t piece_bytes = 0;
  };
  /// inner: over the members of this rank's machine, in their order; null if it is alone there.
  TwoLevelBackend(std::shared_ptr<Backend> flat, std::shared_ptr<Backend> inner, MachineLayout layout, Tuning tuning);

  int rank() const noexcept override { return flat_->rank(); }
  int size() const noexcept override { return flat_->size(); }
  BackendTraits traits() const noexcept override;
  std::unique_ptr<Operation> start(const OperationDescription& description) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  void abort(const std::string& reason) noexcept override;
  void check_ranks() override;

  // For the operations.
  Backend& flat() { return *flat_; }
  Backend* inner() { return inner_.get(); }
  const MachineLayout& layout() const { return layout_; }
  const Tuning& tuning() const { return tuning_; }
  int machine() const { return layout_.machine_of(rank()); }
  const std::vector<int>& neighbours() const { return layout_.members(machine()); }  // of this machine, itself too
  bool is_here(int peer) const { return layout_.machine_of(peer) == machine(); }
  std::uint64_t next_inner_sequence() { return inner_sequence_++; }
  TransportBytes bytes() const { return {inside_.load(), between_.load()}; }
  void count(bool inside, std::size_t bytes) { (inside ? inside_ : between_).fetch_add(bytes); }

  /// Memory that is kept from one operation to the next.
  std::unique_ptr<std::byte[]> take_memory(std::size_t bytes);
  void give_back(std::unique_ptr<std::byte[]> memory, std::size_t bytes);

 private:
  std::shared_ptr<Backend> flat_, inner_;
  MachineLayout layout_;
  Tuning tuning_;
  std::string name_;
  std::uint64_t inner_sequence_ = 0;
  std::atomic<std::uint64_t> inside_{0}, between_{0};
  std::multimap<std::size_t, std::unique_ptr<std::byte[]>> memory_;
  std::size_t kept_ = 0;
};

}  // namespace phalanx
