#include "phalanx/comm/testing/tapped_backend.h"

#include <numeric>
#include <utility>

#include "phalanx/comm/testing/forwarding_backend.h"

namespace phalanx {
namespace {

constexpr std::int64_t kLeastElements = 17;

class TappedBackend final : public ForwardingBackend {
 public:
  TappedBackend(std::shared_ptr<Backend> right, std::string name, std::vector<int> members, Tap tap)
      : ForwardingBackend(std::move(right)),
        name_(std::move(name)),
        members_(std::move(members)),
        tap_(std::move(tap)) {}

  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    auto part = ForwardingBackend::split(request);
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
    auto operation = ForwardingBackend::start(asked);
    if (results.empty()) return operation;
    return std::make_unique<ForwardingOperation>(
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
