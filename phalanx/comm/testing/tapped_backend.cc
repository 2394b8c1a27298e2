#include "phalanx/comm/testing/tapped_backend.h"

#include <numeric>
#include <utility>

#include "phalanx/comm/backend.h"

namespace phalanx {
namespace {

constexpr std::int64_t kLeastElements = 17;

class TappedOperation final : public Operation {
 public:
  TappedOperation(std::unique_ptr<Operation> right, std::function<void()> when_done)
      : right_(std::move(right)), when_done_(std::move(when_done)) {}

  Progress advance() override {
    const Progress progress = right_->advance();
    if (progress == Progress::done) std::exchange(when_done_, [] {})();
    return progress;
  }
  std::optional<Doorbell> doorbell() override { return right_->doorbell(); }
  bool add_doorbells(std::vector<Doorbell>& bells) override { return right_->add_doorbells(bells); }
  void check_peers() override { right_->check_peers(); }
  bool retire() noexcept override { return right_->retire(); }
  std::vector<int> missing_ranks() override { return right_->missing_ranks(); }

 private:
  std::unique_ptr<Operation> right_;
  std::function<void()> when_done_;
};

class TappedBackend final : public Backend {
 public:
  TappedBackend(std::shared_ptr<Backend> right, std::string name, std::vector<int> members, Tap tap)
      : right_(std::move(right)), name_(std::move(name)), members_(std::move(members)), tap_(std::move(tap)) {}

  int rank() const noexcept override { return right_->rank(); }
  int size() const noexcept override { return right_->size(); }
  BackendTraits traits() const noexcept override { return right_->traits(); }
  void abort(const std::string& reason) noexcept override { right_->abort(reason); }
  void check_ranks() override { right_->check_ranks(); }

  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    auto part = right_->split(request);
    if (!part) return nullptr;
    std::vector<int> members;
    for (const int member : request.members) members.push_back(members_[static_cast<std::size_t>(member)]);
    return std::make_shared<TappedBackend>(std::move(part), request.name, std::move(members), tap_);
  }

  std::unique_ptr<Operation> start(const OperationDescription& asked) override {
    struct Result {
      Verb verb;
      float* output;
      std::int64_t count;
      std::vector<float> before;
    };
    std::vector<Result> results;
    const auto add = [&](Verb verb, DataType dtype, void* output, std::int64_t count) {
      if (dtype != DataType::f32 || output == nullptr || count < kLeastElements) return;
      auto* const out = static_cast<float*>(output);
      results.push_back({verb, out, count, {out, out + count}});
    };
    add(asked.verb, asked.dtype, asked.output, asked.output_count);
    for (const Transfer& transfer : asked.transfers) {
      if (!transfer.is_send) add(Verb::recv, transfer.dtype, transfer.data, transfer.count);
    }
    auto operation = right_->start(asked);
    if (results.empty()) return operation;
    return std::make_unique<TappedOperation>(
        std::move(operation), [this, results = std::move(results), input = static_cast<const float*>(asked.input),
                               count = asked.input_count] {
          for (const auto& [verb, output, output_count, before] : results) {
            tap_({.verb = verb,
                  .group = name_,
                  .members = members_,
                  .rank = rank(),
                  .input = input,
                  .input_count = count,
                  .output = output,
                  .output_count = output_count,
                  .before = before});
          }
        });
  }

 private:
  std::shared_ptr<Backend> right_;
  std::string name_;
  std::vector<int> members_;
  Tap tap_;
};

}  // namespace

std::shared_ptr<Communicator> tapped(const std::shared_ptr<Communicator>& world, Tap tap) {
  std::vector<int> members(static_cast<std::size_t>(world->size()));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<Communicator>(
      std::make_shared<TappedBackend>(world->backend(), world->name(), std::move(members), std::move(tap)),
      CommunicatorOptions{.name = world->name()});
}

}  // namespace phalanx
