// For tests: a backend and an operation that pass every call on to another one. A test derives from them what it
// watches or changes. Symmetric memory is not offered.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/comm/backend.h"

namespace phalanx {

class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::shared_ptr<Backend> below) : below_(std::move(below)) {}

  int rank() const noexcept override { return below_->rank(); }
  int size() const noexcept override { return below_->size(); }
  BackendTraits traits() const noexcept override { return below_->traits(); }
  std::unique_ptr<Operation> start(const OperationDescription& asked) override { return below_->start(asked); }
  std::shared_ptr<Backend> split(const SplitRequest& request) override { return below_->split(request); }
  std::shared_ptr<Backend> split_host(const SplitRequest& request) override { return below_->split_host(request); }
  void abort(const std::string& reason) noexcept override { below_->abort(reason); }
  void check_ranks() override { below_->check_ranks(); }

 protected:
  Backend& below() { return *below_; }

 private:
  std::shared_ptr<Backend> below_;
};

/// Calls when_done once, in the advance() that completes it.
class ForwardingOperation final : public Operation {
 public:
  ForwardingOperation(std::unique_ptr<Operation> below, std::function<void()> when_done)
      : below_(std::move(below)), when_done_(std::move(when_done)) {}

  Progress advance() override {
    const Progress progress = below_->advance();
    if (progress == Progress::done) std::exchange(when_done_, [] {})();
    return progress;
  }
  std::optional<Doorbell> doorbell() override { return below_->doorbell(); }
  bool add_doorbells(std::vector<Doorbell>& bells) override { return below_->add_doorbells(bells); }
  void check_peers() override { below_->check_peers(); }
  bool retire() noexcept override { return below_->retire(); }
  std::vector<int> missing_ranks() override { return below_->missing_ranks(); }

 private:
  std::unique_ptr<Operation> below_;
  std::function<void()> when_done_;
};

}  // namespace phalanx
