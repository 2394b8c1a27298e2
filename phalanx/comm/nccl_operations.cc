#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "phalanx/base/error.h"
#include "phalanx/comm/nccl_backend.h"
#include "phalanx/comm/signature.h"
#include "phalanx/comm/slices.h"

namespace phalanx {
namespace {

using NcclOperationClock = std::chrono::steady_clock;

// How long NCCL's own words wait for the control plane to name the culprit.
constexpr std::chrono::milliseconds kNamePatience{700};
// A rank that has ended may have done its part: then the device is through with ours in a moment.
constexpr std::chrono::milliseconds kEndedPatience{500};

// What all operations share: their place among streams, the launch, and the watch over the device.
class NcclOperation : public Operation {
 public:
  std::optional<Doorbell> doorbell() override { return std::nullopt; }
  std::shared_ptr<StreamCompletion> completion() final { return completion_; }
  bool retire() noexcept override {
    // Once the aborted kernels have ended, the device neither reads nor writes our buffers.
    return !has_begun_ || completion_->is_done();
  }

 protected:
  NcclOperation(NcclBackend& backend, const OperationDescription& description)
      : backend_(backend),
        d_(description),
        element_(element_size(description.dtype)),
        type_(nccl_type_of(description.dtype)),
        completion_(std::make_shared<DeviceCompletion>(backend.shared_streams())),
        ready_(backend.streams().record_current()) {}

  std::byte* at(void* data, std::int64_t element) const {
    return static_cast<std::byte*>(data) + static_cast<std::size_t>(element) * element_;
  }
  const std::byte* at(const void* data, std::int64_t element) const {
    return static_cast<const std::byte*>(data) + static_cast<std::size_t>(element) * element_;
  }
  void copy(void* to, const void* from, std::int64_t count) const {
    if (count > 0 && to != from)
      backend_.streams().copy(backend_.stream(), to, from, static_cast<std::size_t>(count) * element_);
  }

  // Puts what body() puts into the stream behind the caller's work. If it throws, what it began still has an end.
  template <class Body>
  void in_stream(Body body) {
    if (!has_begun_) backend_.streams().wait(backend_.stream(), *ready_);
    has_begun_ = true;
    try {
      body();
    } catch (...) {
      mark_end();
      throw;
    }
  }
  void mark_end() { completion_->set(backend_.streams().record(backend_.stream())); }

  // Once launched and agreed upon: is the device through?
  Progress watch() {
    if (error_.empty()) {
      error_ = backend_.group().async_error();
      error_since_ = NcclOperationClock::now();
    }
    if (!error_.empty()) {
      backend_.check_ranks();
      if (NcclOperationClock::now() - error_since_ > kNamePatience) throw CommError("NCCL: " + error_);
      return Progress::blocked;
    }
    const std::shared_ptr<DeviceEvent> end = completion_->event();
    return end && end->is_done() ? Progress::done : Progress::blocked;
  }

  void check_device_peers() {
    try {
      backend_.check_ranks();
      trouble_since_.reset();
    } catch (const CommError&) {
      const auto now = NcclOperationClock::now();
      if (!trouble_since_) trouble_since_ = now;
      if (now - *trouble_since_ > kEndedPatience) throw;
    }
  }

  NcclBackend& backend_;
  const OperationDescription& d_;
  const std::size_t element_;
  const NcclType type_;
  std::shared_ptr<DeviceCompletion> completion_;
  std::shared_ptr<DeviceEvent> ready_;  // what the caller's stream had in hand
  bool has_begun_ = false;

 private:
  std::string error_;
  NcclOperationClock::time_point error_since_{};
  std::optional<NcclOperationClock::time_point> trouble_since_;
};

class NcclCollective final : public NcclOperation {
 public:
  NcclCollective(NcclBackend& backend, const OperationDescription& description)
      : NcclOperation(backend, description), ticket_(backend.window().add(signature_of(description))) {
    if (!backend.strict()) launch();
  }

  Progress advance() override {
    backend_.throw_if_aborted();
    if (stage_ == Stage::signatures) {
      const Progress progress = backend_.window().advance(ticket_);
      if (progress != Progress::done) return progress;
      stage_ = d_.input_counts.empty() ? Stage::device : Stage::counts;
      if (stage_ == Stage::device && !has_begun_) launch();
      return Progress::moved;
    }
    if (stage_ == Stage::counts) {
      if (!counts_operation_) begin_counts();
      const Progress progress = counts_operation_->advance();
      if (progress != Progress::done) return progress;
      counts_operation_.reset();
      compare_counts();
      stage_ = Stage::device;
      if (!has_begun_) launch();
      return Progress::moved;
    }
    return watch();
  }

  std::optional<Doorbell> doorbell() override {
    if (stage_ == Stage::signatures) return backend_.window().doorbell();
    return counts_operation_ ? counts_operation_->doorbell() : std::nullopt;
  }
  void check_peers() override {
    if (stage_ == Stage::signatures) return backend_.window().check_peers();
    if (counts_operation_) return counts_operation_->check_peers();
    check_device_peers();
  }
  std::vector<int> missing_ranks() override {
    if (stage_ == Stage::signatures) return backend_.window().missing_ranks();
    return counts_operation_ ? counts_operation_->missing_ranks() : std::vector<int>();
  }
  bool retire() noexcept override {
    const bool is_control_free =
        stage_ == Stage::signatures ? backend_.window().retire() : !counts_operation_ || counts_operation_->retire();
    return is_control_free && NcclOperation::retire();
  }

 private:
  enum class Stage : std::uint8_t { signatures, counts, device };

  void launch() {
    in_stream([this] { put_in_stream(); });
    mark_end();
  }

  void put_in_stream() {
    const NcclTable& nccl = backend_.table();
    const DeviceStream stream = backend_.stream();
    const auto op = nccl_op_of(d_.op, d_.dtype);
    const auto count = static_cast<std::size_t>(d_.output_count);
    const bool is_root = backend_.rank() == d_.root;
    switch (d_.verb) {
      case Verb::broadcast:
        if (count == 0) return;
        return backend_.group().call("broadcast", [&](NcclComm* comm) {
          return nccl.broadcast(d_.output, d_.output, count, type_, d_.root, comm, stream);
        });
      case Verb::all_reduce:
        if (count == 0) return;
        return backend_.group().call("all_reduce", [&](NcclComm* comm) {
          return nccl.all_reduce(d_.output, d_.output, count, type_, op, comm, stream);
        });
      case Verb::reduce:
        if (count == 0) return;
        return backend_.group().call("reduce", [&](NcclComm* comm) {
          return nccl.reduce(d_.output, is_root ? d_.output : nullptr, count, type_, op, d_.root, comm, stream);
        });
      case Verb::all_gather:
        if (count == 0) return;
        return backend_.group().group_call("all_gather", [&](NcclComm* comm) { return gather_all(comm); });
      case Verb::reduce_scatter:
        if (d_.input_count == 0) return;
        return backend_.group().group_call("reduce_scatter", [&](NcclComm* comm) { return reduce_parts(comm, op); });
      case Verb::gather:
        return gather(is_root);
      case Verb::scatter:
        return scatter(is_root);
      case Verb::all_to_all:
        return exchange_all();
      default:
        throw CommError(fmt::format("{} has no device data", name_of(d_.verb)));
    }
  }

  NcclResult gather_all(NcclComm* comm) const {
    const NcclTable& nccl = backend_.table();
    if (d_.counts.empty())
      return nccl.all_gather(d_.input, d_.output, static_cast<std::size_t>(d_.input_count), type_, comm,
                             backend_.stream());
    return for_each_part(d_.counts, [&](int rank, std::int64_t begin, std::size_t count) {
      std::byte* part = at(d_.output, begin);
      return nccl.broadcast(rank == backend_.rank() ? d_.input : part, part, count, type_, rank, comm,
                            backend_.stream());
    });
  }

  NcclResult reduce_parts(NcclComm* comm, NcclOp op) const {
    const NcclTable& nccl = backend_.table();
    if (d_.counts.empty())
      return nccl.reduce_scatter(d_.input, d_.output, static_cast<std::size_t>(d_.output_count), type_, op, comm,
                                 backend_.stream());
    return for_each_part(d_.counts, [&](int rank, std::int64_t begin, std::size_t count) {
      return nccl.reduce(at(d_.input, begin), rank == backend_.rank() ? d_.output : nullptr, count, type_, op, rank,
                         comm, backend_.stream());
    });
  }

  void gather(bool is_root) const {
    if (d_.input_count == 0) return;
    const auto count = static_cast<std::size_t>(d_.input_count);
    if (is_root) copy(at(d_.output, d_.root * d_.input_count), d_.input, d_.input_count);
    backend_.group().group_call("gather", [&](NcclComm* comm) {
      if (!is_root) return backend_.table().send(d_.input, count, type_, d_.root, comm, backend_.stream());
      return for_each_peer([&](int peer) {
        return backend_.table().recv(at(d_.output, peer * d_.input_count), count, type_, peer, comm, backend_.stream());
      });
    });
  }

  void scatter(bool is_root) const {
    if (d_.output_count == 0) return;
    const auto count = static_cast<std::size_t>(d_.output_count);
    if (is_root) copy(d_.output, at(d_.input, d_.root * d_.output_count), d_.output_count);
    backend_.group().group_call("scatter", [&](NcclComm* comm) {
      if (!is_root) return backend_.table().recv(d_.output, count, type_, d_.root, comm, backend_.stream());
      return for_each_peer([&](int peer) {
        return backend_.table().send(at(d_.input, peer * d_.output_count), count, type_, peer, comm, backend_.stream());
      });
    });
  }

  void exchange_all() const {
    const std::int64_t even = d_.input_count / backend_.size();
    const auto part = [&](const std::vector<std::int64_t>& counts, int rank) { return part_of(counts, even, rank); };
    const Range from = part(d_.input_counts, backend_.rank()), to = part(d_.output_counts, backend_.rank());
    // Unequal counts to oneself are found by compare_counts().
    copy(at(d_.output, static_cast<std::int64_t>(to.begin)), at(d_.input, static_cast<std::int64_t>(from.begin)),
         static_cast<std::int64_t>(std::min(from.size(), to.size())));
    backend_.group().group_call("all_to_all", [&](NcclComm* comm) {
      return for_each_peer([&](int peer) {
        const Range out = part(d_.input_counts, peer), in = part(d_.output_counts, peer);
        NcclResult result = NcclResult::success;
        if (out.size() > 0)
          result = backend_.table().send(at(d_.input, static_cast<std::int64_t>(out.begin)), out.size(), type_, peer,
                                         comm, backend_.stream());
        if (result == NcclResult::success && in.size() > 0)
          result = backend_.table().recv(at(d_.output, static_cast<std::int64_t>(in.begin)), in.size(), type_, peer,
                                         comm, backend_.stream());
        return result;
      });
    });
  }

  // Until one fails. Inside a group NCCL answers success; a communicator that is being made answers in_progress.
  template <class Body>
  NcclResult for_each_peer(Body body) const {
    for (int peer = 0; peer < backend_.size(); ++peer) {
      if (peer == backend_.rank()) continue;
      const NcclResult result = body(peer);
      if (result != NcclResult::success && result != NcclResult::in_progress) return result;
    }
    return NcclResult::success;
  }
  template <class Body>
  static NcclResult for_each_part(const std::vector<std::int64_t>& counts, Body body) {
    std::int64_t begin = 0;
    for (std::size_t rank = 0; rank < counts.size(); begin += counts[rank++]) {
      if (counts[rank] == 0) continue;
      const NcclResult result = body(static_cast<int>(rank), begin, static_cast<std::size_t>(counts[rank]));
      if (result != NcclResult::success && result != NcclResult::in_progress) return result;
    }
    return NcclResult::success;
  }

  void begin_counts() {
    own_counts_ = d_.input_counts;
    own_counts_.insert(own_counts_.end(), d_.output_counts.begin(), d_.output_counts.end());
    all_counts_.resize(own_counts_.size() * d_.input_counts.size());
    counts_description_.verb = Verb::all_gather;
    counts_description_.dtype = DataType::i64;
    counts_description_.sequence = d_.sequence;
    counts_description_.input = own_counts_.data();
    counts_description_.input_count = static_cast<std::int64_t>(own_counts_.size());
    counts_description_.output = all_counts_.data();
    counts_description_.output_count = static_cast<std::int64_t>(all_counts_.size());
    counts_operation_ = backend_.control().start(counts_description_);
  }
  void compare_counts() const {
    const std::size_t n = d_.input_counts.size();
    std::vector<const std::int64_t*> inputs, outputs;
    for (std::size_t rank = 0; rank < n; ++rank) {
      inputs.push_back(&all_counts_[rank * 2 * n]);
      outputs.push_back(inputs.back() + n);
    }
    if (const std::string text = all_to_all_mismatch(inputs, outputs); !text.empty()) throw CommError(text);
  }

  const std::uint64_t ticket_;
  Stage stage_ = Stage::signatures;
  std::vector<std::int64_t> own_counts_, all_counts_;
  OperationDescription counts_description_;
  std::unique_ptr<Operation> counts_operation_;
};

class NcclMessages final : public NcclOperation {
 public:
  NcclMessages(NcclBackend& backend, const OperationDescription& description) : NcclOperation(backend, description) {
    for (const Transfer& one : d_.transfers) {
      if (one.peer != backend_.rank())
        remote_.push_back(&one);
      else if (one.is_send)
        send_to_self(one);
      else
        self_receives_.push_back(&one);
    }
    if (!remote_.empty()) turn_ = backend_.take_turn();
    is_agreed_ = remote_.empty();
    if (!backend_.strict() || is_agreed_) launch_what_can_be();
  }

  Progress advance() override {
    backend_.throw_if_aborted();
    if (!is_agreed_) {
      if (!headers_operation_) begin_headers();
      const Progress progress = headers_operation_->advance();
      if (progress != Progress::done) return progress;
      headers_operation_.reset();
      compare_headers();
      is_agreed_ = true;
    }
    if (!completion_->event()) launch_what_can_be();
    return watch();
  }

  std::optional<Doorbell> doorbell() override {
    return headers_operation_ ? headers_operation_->doorbell() : std::nullopt;
  }
  void check_peers() override { headers_operation_ ? headers_operation_->check_peers() : check_device_peers(); }
  std::vector<int> missing_ranks() override {
    if (headers_operation_) return headers_operation_->missing_ranks();
    std::vector<int> peers;
    for (const Transfer& one : d_.transfers)
      if (std::find(peers.begin(), peers.end(), one.peer) == peers.end()) peers.push_back(one.peer);
    return peers;
  }
  bool retire() noexcept override {
    if (headers_operation_ && !headers_operation_->retire()) return false;
    // A message to oneself that nobody has asked for, or will, is given up.
    const std::lock_guard lock(backend_.self_mutex());
    std::erase_if(backend_.self_messages(), [this](const auto& message) {
      return std::find(self_sends_.begin(), self_sends_.end(), message.taken) != self_sends_.end();
    });
    for (const auto& taken : self_sends_)
      if (taken->event() && !taken->is_done()) return false;
    if (has_begun_ && !completion_->event()) mark_end();
    return NcclOperation::retire();
  }

 private:
  struct Header {
    std::int64_t count = 0;
    std::int32_t tag = 0;
    DataType dtype = DataType::u8;
    std::uint8_t unused[3] = {};
  };
  static_assert(sizeof(Header) == 16);

  static std::string text_of(DataType dtype, std::int64_t count) {
    return fmt::format("{}[{}]", name_of(dtype), count);
  }

  // Everything that is to happen on the device is in the stream: then the operation has an end.
  void launch_what_can_be() {
    const bool may_move = !backend_.strict() || is_agreed_;
    if (!is_remote_launched_ && may_move && (remote_.empty() || backend_.is_turn(turn_))) launch_remote();
    std::erase_if(self_receives_, [this](const Transfer* one) { return receive_from_self(*one); });
    const bool all_taken = std::all_of(self_sends_.begin(), self_sends_.end(),
                                       [](const auto& taken) { return taken->event() != nullptr; });
    if (!is_remote_launched_ || !self_receives_.empty() || !all_taken) return;
    in_stream([] {});
    mark_end();
  }

  void launch_remote() {
    is_remote_launched_ = true;
    if (remote_.empty()) return;
    in_stream([this] {
      backend_.group().group_call(name_of(d_.verb).data(), [&](NcclComm* comm) {
        const NcclTable& nccl = backend_.table();
        for (const Transfer* one : remote_) {
          if (one->count == 0) continue;
          const auto count = static_cast<std::size_t>(one->count);
          const NcclType type = nccl_type_of(one->dtype);
          const NcclResult result = one->is_send
                                        ? nccl.send(one->data, count, type, one->peer, comm, backend_.stream())
                                        : nccl.recv(one->data, count, type, one->peer, comm, backend_.stream());
          if (result != NcclResult::success && result != NcclResult::in_progress) return result;
        }
        return NcclResult::success;
      });
    });
    backend_.end_turn();
  }

  void send_to_self(const Transfer& one) {
    self_sends_.push_back(std::make_shared<DeviceCompletion>(backend_.shared_streams()));
    const std::lock_guard lock(backend_.self_mutex());
    backend_.self_messages().push_back({one.tag, one.dtype, one.count, one.data, ready_, self_sends_.back()});
  }

  bool receive_from_self(const Transfer& one) {
    const std::lock_guard lock(backend_.self_mutex());
    auto& messages = backend_.self_messages();
    const auto found =
        std::find_if(messages.begin(), messages.end(), [&](const auto& message) { return message.tag == one.tag; });
    if (found == messages.end()) return false;
    if (found->dtype != one.dtype || found->count != one.count)
      throw CommError(fmt::format("rank {} sends itself {} under tag {} and receives {}", backend_.rank(),
                                  text_of(found->dtype, found->count), one.tag, text_of(one.dtype, one.count)));
    in_stream([&] {
      backend_.streams().wait(backend_.stream(), *found->ready);
      backend_.streams().copy(backend_.stream(), one.data, found->data,
                              static_cast<std::size_t>(one.count) * element_size(one.dtype));
    });
    found->taken->set(backend_.streams().record(backend_.stream()));
    messages.erase(found);
    return true;
  }

  // Type, length and tag of each message travel beside it.
  void begin_headers() {
    headers_.resize(remote_.size());
    headers_description_.verb = Verb::batch_p2p;
    headers_description_.sequence = d_.sequence;
    for (std::size_t i = 0; i < remote_.size(); ++i) {
      const Transfer& one = *remote_[i];
      if (one.is_send) headers_[i] = {one.count, one.tag, one.dtype};
      headers_description_.transfers.push_back(
          {one.is_send, &headers_[i], static_cast<std::int64_t>(sizeof(Header)), DataType::u8, one.peer, 0});
    }
    headers_operation_ = backend_.control().start(headers_description_);
  }
  void compare_headers() const {
    for (std::size_t i = 0; i < remote_.size(); ++i) {
      const Transfer& mine = *remote_[i];
      const Header& theirs = headers_[i];
      if (mine.is_send || (theirs.count == mine.count && theirs.dtype == mine.dtype && theirs.tag == mine.tag))
        continue;
      std::string text = fmt::format("rank {} sends {} under tag {} and rank {} receives {}", mine.peer,
                                     text_of(theirs.dtype, theirs.count), theirs.tag, backend_.rank(),
                                     text_of(mine.dtype, mine.count));
      if (theirs.tag != mine.tag)
        text +=
            fmt::format(" under tag {}: nccl matches the messages between two ranks in the order of issue", mine.tag);
      throw CommError(text);
    }
  }

  std::vector<const Transfer*> remote_, self_receives_;
  std::vector<std::shared_ptr<DeviceCompletion>> self_sends_;
  std::uint64_t turn_ = 0;
  bool is_agreed_ = false;
  bool is_remote_launched_ = false;
  std::vector<Header> headers_;
  OperationDescription headers_description_;
  std::unique_ptr<Operation> headers_operation_;
};

}  // namespace

std::unique_ptr<Operation> make_nccl_collective(NcclBackend& backend, const OperationDescription& description) {
  return std::make_unique<NcclCollective>(backend, description);
}

std::unique_ptr<Operation> make_nccl_messages(NcclBackend& backend, const OperationDescription& description) {
  return std::make_unique<NcclMessages>(backend, description);
}

}  // namespace phalanx
