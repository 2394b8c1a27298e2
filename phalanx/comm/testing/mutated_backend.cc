#include "phalanx/comm/testing/mutated_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "phalanx/comm/backend.h"

namespace phalanx {
namespace {

using Values = std::vector<float>;

class MutatedOperation final : public Operation {
 public:
  MutatedOperation(std::unique_ptr<Operation> right, std::function<void()> spoil)
      : right_(std::move(right)), spoil_(std::move(spoil)) {}

  Progress advance() override {
    const Progress progress = right_->advance();
    if (progress == Progress::done) std::exchange(spoil_, [] {})();
    return progress;
  }
  std::optional<Doorbell> doorbell() override { return right_->doorbell(); }
  bool add_doorbells(std::vector<Doorbell>& bells) override { return right_->add_doorbells(bells); }
  void check_peers() override { right_->check_peers(); }
  bool retire() noexcept override { return right_->retire(); }
  std::vector<int> missing_ranks() override { return right_->missing_ranks(); }

 private:
  std::unique_ptr<Operation> right_;
  std::function<void()> spoil_;
};

class MutatedBackend final : public Backend {
 public:
  MutatedBackend(std::shared_ptr<Backend> right, std::string name, Mutation mutation)
      : right_(std::move(right)), name_(std::move(name)), mutation_(std::move(mutation)) {}

  int rank() const noexcept override { return right_->rank(); }
  int size() const noexcept override { return right_->size(); }
  BackendTraits traits() const noexcept override { return right_->traits(); }
  void abort(const std::string& reason) noexcept override { right_->abort(reason); }
  void check_ranks() override { right_->check_ranks(); }

  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    auto part = right_->split(request);
    if (!part) return nullptr;
    return std::make_shared<MutatedBackend>(std::move(part), request.name, mutation_);
  }

  std::unique_ptr<Operation> start(const OperationDescription& asked) override {
    auto operation = right_->start(asked);
    if (!concerns(asked)) return operation;
    auto* const out = static_cast<float*>(asked.output);
    Values before(out, out + asked.output_count);
    return std::make_unique<MutatedOperation>(
        std::move(operation),
        [this, out, count = asked.output_count, before = std::move(before)] { spoil(out, count, before); });
  }

 private:
  bool concerns(const OperationDescription& asked) const {
    const Mutation& m = mutation_;
    return asked.verb == m.verb && asked.dtype == DataType::f32 && asked.output != nullptr &&
           asked.output_count >= m.least_elements && (m.only_elements == 0 || asked.output_count == m.only_elements) &&
           (m.group.empty() || m.group == name_) && (m.rank < 0 || m.rank == rank());
  }

  void spoil(float* out, std::int64_t count, const Values& before) {
    const auto n = static_cast<std::size_t>(count);
    const auto each = [&](auto change) { std::for_each(out, out + n, change); };
    const Values result(out, out + n);
    switch (mutation_.kind) {
      case MutationKind::dropped:
        std::ranges::copy(before, out);
        break;
      case MutationKind::doubled:
        each([](float& x) { x *= 2; });
        break;
      case MutationKind::halved:
        each([](float& x) { x /= 2; });
        break;
      case MutationKind::stale:
        if (last_.size() == n) std::ranges::copy(last_, out);
        break;
      case MutationKind::swapped: {
        const std::size_t part = mutation_.verb == Verb::all_gather ? n / static_cast<std::size_t>(size()) : n / 2;
        std::swap_ranges(out, out + part, out + n - part);
        break;
      }
      case MutationKind::one_off:
        out[n / 2] += 1;
        break;
      case MutationKind::zeroed:
        each([](float& x) { x = 0; });
        break;
    }
    last_ = result;
  }

  std::shared_ptr<Backend> right_;
  std::string name_;
  Mutation mutation_;
  Values last_;  // the right result of the operation before
};

}  // namespace

std::shared_ptr<Communicator> mutated(const std::shared_ptr<Communicator>& world, Mutation mutation) {
  return std::make_shared<Communicator>(
      std::make_shared<MutatedBackend>(world->backend(), world->name(), std::move(mutation)),
      CommunicatorOptions{.name = world->name()});
}

}  // namespace phalanx
