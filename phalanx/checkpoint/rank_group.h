// Ranks that do a piece of work each and all see the same outcome. Used by one thread at a time, as its communicator.
//
//   const auto sizes = ranks.run_collectively([&] { return std::to_string(write_mine()); });   // of all, or throws on all
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace phalanx {

class Communicator;

class RankGroup {
 public:
  explicit RankGroup(std::shared_ptr<Communicator> comm = nullptr);  // without one: this process alone

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Collective. Runs `work`, which sends nothing, on every rank and returns all results. If it fails on any rank, all
  /// throw the same error of the same class (error_serialization.h), which names the rank unless all failed alike: a
  /// DamagedError only where nothing worse has happened.
  std::vector<std::string> run_collectively(const std::function<std::string()>& work) const;
  /// The same ranks with a communicator of their own, for another thread. Collective.
  RankGroup split() const;

 private:
  std::shared_ptr<Communicator> comm_;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace phalanx
