#include "phalanx/comm/device/staged_backend.h"

#include <atomic>
#include <vector>

#include "phalanx/comm/abort_state.h"
#include "phalanx/comm/device/device_completion.h"
#include "phalanx/comm/device/pinned_pool.h"

namespace phalanx {
namespace {

using Pinned = std::shared_ptr<std::byte>;

class StagedBackend final : public Backend {
 public:
  StagedBackend(std::shared_ptr<Backend> host, int cuda_device, std::shared_ptr<DeviceStreams> streams)
      : host_(std::move(host)),
        cuda_device_(cuda_device),
        streams_(std::move(streams)),
        stream_(streams_->make_stream()),
        pool_(streams_) {}

  int rank() const noexcept override { return host_->rank(); }
  int size() const noexcept override { return host_->size(); }
  BackendTraits traits() const noexcept override {
    BackendTraits traits = host_->traits();
    traits.host_only = cuda_device_ < 0;
    traits.stream_ordered = true;
    traits.cuda_device = cuda_device_;
    return traits;
  }
  std::unique_ptr<Operation> start(const OperationDescription& description) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    auto host = host_->split(request);
    return host ? std::make_shared<StagedBackend>(std::move(host), cuda_device_, streams_) : nullptr;
  }
  std::shared_ptr<Backend> split_host(const SplitRequest& request) override { return host_->split_host(request); }
  void abort(const std::string& reason) noexcept override {
    abort_.set(reason);
    host_->abort(reason);
  }
  void check_ranks() override { host_->check_ranks(); }

  Backend& host() { return *host_; }
  const std::shared_ptr<DeviceStreams>& streams() const { return streams_; }
  DeviceStream stream() const { return stream_; }
  PinnedPool& pool() { return pool_; }

  /// Turns make the host's operations start in issue order, whichever of their inputs is seen to arrive first. Messages
  /// between two ranks with the same tag match in that order.
  std::uint64_t take_turn() { return next_turn_++; }
  bool is_turn(std::uint64_t turn) const { return turn == started_turns_.load(std::memory_order_acquire); }
  // A turn that fails to start never ends: then the backend has been aborted, and no later operation waits for it.
  void throw_if_aborted() const { abort_.throw_if_set(); }
  void end_turn() { started_turns_.fetch_add(1, std::memory_order_acq_rel); }

 private:
  std::shared_ptr<Backend> host_;
  int cuda_device_;
  std::shared_ptr<DeviceStreams> streams_;
  DeviceStream stream_;
  PinnedPool pool_;
  std::uint64_t next_turn_ = 0;
  std::atomic<std::uint64_t> started_turns_{0};
  AbortState abort_;
};

// Device to pinned memory, the host's operation, pinned memory to device.
class StagedOperation final : public Operation {
 public:
  StagedOperation(StagedBackend& backend, const OperationDescription& description)
      : backend_(backend),
        d_(description),
        on_host_(description),
        completion_(std::make_shared<DeviceCompletion>(backend.streams())) {
    on_host_.on_device = false;
    backend_.streams()->wait(backend_.stream(), *backend_.streams()->record_current());
    completion_->began(backend_.streams()->record_timed(backend_.stream()));
    const std::size_t element = element_size(d_.dtype);
    const bool is_root = backend_.rank() == d_.root;
    if (d_.input != nullptr)
      on_host_.input = stage(const_cast<void*>(d_.input), bytes(d_.input_count, element), true, false);
    if (d_.output != nullptr) {
      const bool is_read =
          d_.verb == Verb::all_reduce || d_.verb == Verb::reduce || (d_.verb == Verb::broadcast && is_root);
      const bool is_written = !(d_.verb == Verb::reduce && !is_root) && !(d_.verb == Verb::broadcast && is_root);
      on_host_.output = stage(d_.output, bytes(d_.output_count, element), is_read, is_written);
    }
    for (Transfer& one : on_host_.transfers)
      one.data = stage(one.data, bytes(one.count, element_size(one.dtype)), one.is_send, !one.is_send);
    arrived_ = backend_.streams()->record(backend_.stream());
    turn_ = backend_.take_turn();
  }
  ~StagedOperation() override {
    for (Piece& piece : pieces_) backend_.pool().give_back(piece.bytes, std::move(piece.pinned));
  }

  Progress advance() override {
    if (completion_->event()) return completion_->event()->is_done() ? Progress::done : Progress::blocked;
    if (!operation_) {
      backend_.throw_if_aborted();
      if (!backend_.is_turn(turn_) || !arrived_->is_done()) return Progress::blocked;
      operation_ = backend_.host().start(on_host_);
      backend_.end_turn();
    }
    const Progress progress = operation_->advance();
    if (progress != Progress::done) return progress;
    for (const Piece& piece : pieces_)
      if (piece.is_written) copy_back(piece);
    completion_->set(backend_.streams()->record_timed(backend_.stream()));
    return Progress::moved;
  }
  std::optional<Doorbell> doorbell() override {
    return operation_ && !completion_->event() ? operation_->doorbell() : std::nullopt;
  }
  bool add_doorbells(std::vector<Doorbell>& bells) override {
    return operation_ && !completion_->event() && operation_->add_doorbells(bells);
  }
  void check_peers() override {
    if (operation_ && !completion_->event()) operation_->check_peers();
  }
  std::vector<int> missing_ranks() override { return operation_ ? operation_->missing_ranks() : std::vector<int>(); }
  bool retire() noexcept override {
    if (operation_ && !operation_->retire()) return false;
    try {
      // Our own copies must be complete, too.
      return arrived_->is_done() && (!completion_->event() || completion_->is_done());
    } catch (const std::exception&) {
      return true;  // the device has failed
    }
  }
  std::shared_ptr<StreamCompletion> completion() override { return completion_; }

 private:
  struct Piece {
    void* on_device = nullptr;
    std::size_t bytes = 0;
    bool is_written = false;
    Pinned pinned;
  };
  static std::size_t bytes(std::int64_t count, std::size_t element) {
    return static_cast<std::size_t>(count) * element;
  }

  std::byte* stage(void* on_device, std::size_t size, bool is_read, bool is_written) {
    pieces_.push_back({on_device, size, is_written, backend_.pool().take(size)});
    std::byte* pinned = pieces_.back().pinned.get();
    if (is_read) backend_.streams()->copy(backend_.stream(), pinned, on_device, size);
    return pinned;
  }

  // This rank's part of an all_gather in place is on the device already, and may be in use there.
  void copy_back(const Piece& piece) {
    auto* const begin = static_cast<std::byte*>(piece.on_device);
    const auto copy = [&](std::size_t from, std::size_t to) {
      if (from < to) backend_.streams()->copy(backend_.stream(), begin + from, piece.pinned.get() + from, to - from);
    };
    const auto* const own = static_cast<const std::byte*>(d_.input);
    if (d_.verb != Verb::all_gather || own < begin || own >= begin + piece.bytes) return copy(0, piece.bytes);
    const auto own_begin = static_cast<std::size_t>(own - begin);
    copy(0, own_begin);
    copy(own_begin + bytes(d_.input_count, element_size(d_.dtype)), piece.bytes);
  }

  StagedBackend& backend_;
  const OperationDescription& d_;
  OperationDescription on_host_;
  std::vector<Piece> pieces_;
  std::shared_ptr<DeviceCompletion> completion_;
  std::shared_ptr<DeviceEvent> arrived_;  // the input is in pinned memory
  std::unique_ptr<Operation> operation_;
  std::uint64_t turn_ = 0;
};

std::unique_ptr<Operation> StagedBackend::start(const OperationDescription& description) {
  abort_.throw_if_set();
  if (!description.on_device) return host_->start(description);
  return std::make_unique<StagedOperation>(*this, description);
}

}  // namespace

std::shared_ptr<Backend> make_staged_backend(std::shared_ptr<Backend> host, int cuda_device) {
  return make_staged_backend(std::move(host), cuda_device, make_cuda_streams(cuda_device));
}

std::shared_ptr<Backend> make_staged_backend(std::shared_ptr<Backend> host, int cuda_device,
                                             std::shared_ptr<DeviceStreams> streams) {
  return std::make_shared<StagedBackend>(std::move(host), cuda_device, std::move(streams));
}

}  // namespace phalanx
