// SignatureWindow: compares, over a backend for host memory, the signatures of operations whose data moves elsewhere
// (nccl). Up to kWindow operations share one exchange, so a slow control plane keeps up with a fast device.
//
// Every rank contributes the signatures that it has issued and not compared yet, oldest first. Those that all ranks
// have contributed are compared. Their number is the same on all ranks, so the next exchange starts at the same
// operation.
//
//   const std::uint64_t ticket = window.add(signature_of(description));   // in issue order, any thread
//   while (window.advance(ticket) != Progress::done) {}                   // by the driver of the control backend
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/signature.h"

namespace phalanx {

class SignatureWindow {
 public:
  explicit SignatureWindow(Backend& control) : control_(control) {}

  /// Returns the operation's ticket: its index among those added.
  std::uint64_t add(const Signature& signature);
  /// Done when the operation's signature has been compared. Throws CommError as require_equal_signatures() does.
  Progress advance(std::uint64_t ticket);
  std::optional<Doorbell> doorbell() { return operation_ ? operation_->doorbell() : std::nullopt; }
  void check_peers() {
    if (operation_) operation_->check_peers();
  }
  std::vector<int> missing_ranks() { return operation_ ? operation_->missing_ranks() : std::vector<int>(); }
  /// False while a peer may still read what this rank contributed.
  bool retire() noexcept { return !operation_ || operation_->retire(); }

 private:
  static constexpr std::size_t kWindow = 15;
  struct Contribution {
    std::uint64_t count = 0;
    std::array<Signature, kWindow> signatures;
  };
  void begin();
  void compare();

  Backend& control_;
  std::mutex mutex_;  // guards waiting_ and added_
  std::deque<Signature> waiting_;
  std::uint64_t added_ = 0;
  // Used by the driver only.
  std::uint64_t compared_ = 0;
  Contribution mine_;
  std::vector<Contribution> all_;
  OperationDescription description_;
  std::unique_ptr<Operation> operation_;
};

}  // namespace phalanx
