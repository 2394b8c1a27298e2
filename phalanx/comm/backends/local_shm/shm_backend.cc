#include "phalanx/comm/backends/local_shm/shm_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/local_shm/round_operation.h"
#include "phalanx/comm/backends/local_shm/shared_heap.h"
#include "phalanx/comm/backends/local_shm/shm_segment.h"
#include "phalanx/comm/wait.h"

namespace phalanx {
namespace {

// Measured (docs/communication_internals.md): large enough that a wait is short compared with the copy; small enough
// that data copied in is still in the second-level cache when it is copied out.
constexpr std::size_t kSlotBytes = 512U << 10;
constexpr std::size_t kChannelChunk = 128U << 10;

// What the ranks of a group, and of those split from it, have published about themselves.
class ShmRanks {
 public:
  static std::string own() {
    const SharedHeap* const heap = SharedHeap::current();
    return ProcessProbe::identity() + '\n' + (heap ? heap->address() : "");
  }
  ShmRanks(const std::vector<std::string>& all, std::chrono::milliseconds heartbeat)
      : processes(std::make_shared<ProcessProbe>(lines(all, 0), heartbeat)), heaps_(lines(all, 1)) {}

  std::vector<std::string> heaps_of(const std::vector<int>& members) const {
    std::vector<std::string> some;
    for (const int member : members) some.push_back(heaps_[static_cast<std::size_t>(member)]);
    return some;
  }

  const std::shared_ptr<ProcessProbe> processes;

 private:
  static std::vector<std::string> lines(const std::vector<std::string>& all, int which) {
    std::vector<std::string> some;
    for (const std::string& text : all) {
      std::istringstream in(text);
      std::string line;
      for (int k = 0; k <= which; ++k) std::getline(in, line);
      some.push_back(in ? line : std::string());
    }
    return some;
  }

  std::vector<std::string> heaps_;  // SharedHeap::address(); empty: none
};

class ShmBackend final : public Backend {
 public:
  ShmBackend(std::shared_ptr<ShmSegment> segment, std::shared_ptr<const ShmRanks> ranks, std::vector<int> members,
             std::vector<int> names, int rank, bool is_oversubscribed)
      : segment_(std::move(segment)),
        ranks_(std::move(ranks)),
        members_(std::move(members)),
        is_oversubscribed_(is_oversubscribed),
        control_block_(
            ShmSegment::control_block(segment_), rank, segment_->layout().size,
            [this](int peer) { return ranks_->processes->failure_reason(members_[static_cast<std::size_t>(peer)]); }),
        channels_(control_block_, segment_->channels()) {
    control_block_.set_names(std::move(names));
    windows_.add_heaps(ranks_->heaps_of(members_), rank);
  }

  int rank() const noexcept override { return control_block_.rank(); }
  int size() const noexcept override { return control_block_.size(); }
  BackendTraits traits() const noexcept override {
    return {.name = "shm", .rank_order_reduction = true, .host_only = true, .oversubscribed = is_oversubscribed_};
  }
  std::unique_ptr<Operation> start(const OperationDescription& description) override {
    if (!description.transfers.empty()) return std::make_unique<P2POperation>(channels_, description);
    return std::make_unique<RoundOperation>(control_block_, description, *segment_, windows_);
  }
  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    const ShmLayout layout{static_cast<int>(request.members.size()), kSlotBytes, kChannelChunk};
    auto segment = ShmSegment::make(layout, request.members, request.rank, request.exchange);
    if (!segment) return nullptr;
    std::vector<int> members;
    for (int member : request.members) members.push_back(members_[static_cast<std::size_t>(member)]);
    return std::make_shared<ShmBackend>(std::move(segment), ranks_, std::move(members), request.names, request.rank,
                                        is_oversubscribed_);
  }
  std::shared_ptr<std::byte> make_symmetric(std::size_t bytes, SymmetricOptions options,
                                            const SymmetricExchange& exchange) override {
    if (size() == 1 || bytes == 0) return nullptr;
    auto window = windows_.make({bytes, rank(), size(), options}, exchange);
    std::byte* const part = window->part(rank());
    return {std::move(window), part};
  }
  void abort(const std::string& reason) noexcept override { control_block_.abort(reason); }
  void check_ranks() override { control_block_.check_ranks(); }

 private:
  std::shared_ptr<ShmSegment> segment_;
  std::shared_ptr<const ShmRanks> ranks_;
  std::vector<int> members_;  // indices into ranks_
  bool is_oversubscribed_;
  ControlBlock control_block_;
  P2PChannels channels_;
  ShmWindows windows_;
};

// All-gathers a value through the store. If a rank dies meanwhile, that is an error at once.
class StoreExchange {
 public:
  StoreExchange(Store& store, std::string prefix, int rank, int size, std::chrono::milliseconds timeout)
      : store_(store), prefix_(std::move(prefix)), rank_(rank), size_(size), timeout_(timeout) {
    store_.set_when_lost(lost_key(rank_), "");
  }
  ~StoreExchange() {
    try {
      store_.cancel_when_lost(lost_key(rank_));
    } catch (const Error&) {
      // The store is gone.
    }
  }
  StoreExchange(const StoreExchange&) = delete;
  StoreExchange& operator=(const StoreExchange&) = delete;

  /// From now on a stopped rank is an error, too.
  void watch(std::shared_ptr<ProcessProbe> processes) { processes_ = std::move(processes); }

  std::vector<std::string> operator()(const std::string& value) {
    std::vector<std::string> keys;
    for (int r = 0; r < size_; ++r) keys.push_back(fmt::format("{}/{}/{}", prefix_, number_, r));
    ++number_;
    store_.set(keys[static_cast<std::size_t>(rank_)], value);
    const auto deadline = Clock::now() + timeout_;
    for (;;) {
      const auto begin = Clock::now();
      const auto slice = std::min(kLook, std::chrono::ceil<std::chrono::milliseconds>(deadline - begin));
      try {
        return store_.get_all(keys, slice);
      } catch (const CommError&) {
        if (Clock::now() - begin < slice) throw;  // not a timeout
      }
      // Also for a rank that has published this value: its next one will not come. A rank that was lost takes
      // precedence over one that only ended, perhaps because of the loss.
      for (int r = 0; r < size_; ++r)
        if (store_.try_get(lost_key(r))) throw_not_made(r, "has died");
      std::string missing;
      for (int r = 0; r < size_; ++r) {
        if (processes_)
          if (const std::string why = processes_->failure_reason(r); !why.empty()) throw_not_made(r, why);
        if (!store_.try_get(keys[static_cast<std::size_t>(r)]))
          missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
      }
      if (Clock::now() >= deadline && !missing.empty())
        throw CommError(fmt::format("shm: {}: of {} ranks these have not come within {} s: {}", store_.describe(),
                                    size_, static_cast<double>(timeout_.count()) / 1000, missing));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kLook{100};
  [[noreturn]] static void throw_not_made(int rank, const std::string& why) {
    throw CommError(fmt::format("the group of shm could not be made: rank {} {}", rank, why));
  }
  std::string lost_key(int rank) const { return fmt::format("{}/lost/{}", prefix_, rank); }

  Store& store_;
  const std::string prefix_;
  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  int number_ = 0;
  std::shared_ptr<ProcessProbe> processes_;
};

}  // namespace

std::shared_ptr<Backend> make_shm_backend(Store& store, int rank, int size, const std::string& name,
                                          std::chrono::milliseconds timeout, std::chrono::milliseconds heartbeat) {
  if (rank < 0 || rank >= size) throw Error(fmt::format("shm: rank {} of a world of {}", rank, size));
  // A store may serve several groups of one name, one after the other: each rank counts its own calls.
  const std::string prefix = fmt::format("shm/{}", name);
  const std::int64_t call = store.add(fmt::format("{}/calls/{}", prefix, rank), 1);
  StoreExchange exchange(store, fmt::format("{}/{}", prefix, call), rank, size, timeout);
  auto ranks = std::make_shared<ShmRanks>(exchange(ShmRanks::own()), heartbeat);
  exchange.watch(ranks->processes);
  std::vector<int> members;
  for (int r = 0; r < size; ++r) members.push_back(r);
  auto segment = ShmSegment::make({size, kSlotBytes, kChannelChunk}, members, rank, std::ref(exchange));
  return std::make_shared<ShmBackend>(std::move(segment), std::move(ranks), std::move(members), std::vector<int>(),
                                      rank, size > available_cores());
}

std::shared_ptr<Backend> make_shm_part(const std::vector<int>& members, int rank, const ShmSegment::Exchange& exchange,
                                       std::chrono::milliseconds heartbeat) {
  const std::vector<std::string> all = exchange(ShmRanks::own());
  std::vector<std::string> those;
  std::vector<int> places;
  for (const int member : members) {
    places.push_back(static_cast<int>(places.size()));
    those.push_back(all[static_cast<std::size_t>(member)]);
  }
  const int size = static_cast<int>(members.size());
  auto segment = ShmSegment::make({size, kSlotBytes, kChannelChunk}, members, rank, exchange);
  if (!segment) return nullptr;
  return std::make_shared<ShmBackend>(std::move(segment), std::make_shared<ShmRanks>(those, heartbeat),
                                      std::move(places), members, rank, size > available_cores());
}

}  // namespace phalanx
