// RankGroup runs work on several ranks so that all see the same outcome. Like its communicator, it is used by one
// thread at a time.
//
//   // The results of all ranks, or an exception on all ranks:
//   const auto sizes = ranks.run_collectively([&] { return std::to_string(write_mine()); });
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace phalanx {

class Communicator;

class RankGroup {
 public:
  explicit RankGroup(std::shared_ptr<Communicator> comm = nullptr);  // null: only this process

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Collective. Runs `work` on every rank and returns all results. If it fails on any rank, all throw the same error
  /// of the same class (error_serialization.h). The error names the rank, unless all ranks failed in the same way. It
  /// is a DamagedError only if no rank had another error.
  /// REQUIRES: `work` does not communicate.
  std::vector<std::string> run_collectively(const std::function<std::string()>& work) const;
  /// Collective. The same ranks with a new communicator, for another thread.
  RankGroup split() const;

 private:
  std::shared_ptr<Communicator> comm_;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace phalanx
