#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/nccl/nccl_operation.h"
#include "phalanx/comm/signature.h"
#include "phalanx/comm/slices.h"

namespace phalanx {
namespace {

class NcclCollective final : public NcclOperation {
 public:
  NcclCollective(NcclBackend& backend, const OperationDescription& description)
      : NcclOperation(backend, description), ticket_(backend.window().add(signature_of(description))) {
    take_turn();
  }

  void launch() override {
    if (may_launch()) launch_briefly([this] { return launch_next(); });
  }

  Progress advance() override {
    backend_.throw_if_aborted();
    if (may_launch() && !is_launched()) launch_next();
    if (stage_ == Stage::signatures) {
      const Progress progress = backend_.window().advance(ticket_);
      if (progress != Progress::done) return progress;
      stage_ = d_.input_counts.empty() ? Stage::device : Stage::counts;
      return Progress::moved;
    }
    if (stage_ == Stage::counts) {
      if (!counts_operation_) begin_counts();
      const Progress progress = counts_operation_->advance();
      if (progress != Progress::done) return progress;
      counts_operation_.reset();
      compare_counts();
      stage_ = Stage::device;
      return Progress::moved;
    }
    return poll_completion();
  }

  std::optional<Doorbell> doorbell() override {
    if (may_launch() && !is_launched()) return std::nullopt;
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

  bool may_launch() const { return !backend_.strict() || stage_ == Stage::device; }
  bool launch_next() {
    return launch_step([this] { put_in_stream(); }, [this] { mark_end(); });
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
        return backend_.group().begin("broadcast", [&](NcclComm* comm) {
          return nccl.broadcast(d_.output, d_.output, count, type_, d_.root, comm, stream);
        });
      case Verb::all_reduce:
        if (count == 0) return;
        return backend_.group().begin("all_reduce", [&](NcclComm* comm) {
          return nccl.all_reduce(d_.output, d_.output, count, type_, op, comm, stream);
        });
      case Verb::reduce:
        if (count == 0) return;
        return backend_.group().begin("reduce", [&](NcclComm* comm) {
          return nccl.reduce(d_.output, is_root ? d_.output : nullptr, count, type_, op, d_.root, comm, stream);
        });
      case Verb::all_gather:
        if (count == 0) return;
        return backend_.group().begin_group("all_gather", [&](NcclComm* comm) { return gather_all(comm); });
      case Verb::reduce_scatter:
        if (d_.input_count == 0) return;
        return backend_.group().begin_group("reduce_scatter", [&](NcclComm* comm) { return reduce_parts(comm, op); });
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
    backend_.group().begin_group("gather", [&](NcclComm* comm) {
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
    backend_.group().begin_group("scatter", [&](NcclComm* comm) {
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
    // compare_counts() finds unequal counts of a rank with itself.
    copy(at(d_.output, static_cast<std::int64_t>(to.begin)), at(d_.input, static_cast<std::int64_t>(from.begin)),
         static_cast<std::int64_t>(std::min(from.size(), to.size())));
    backend_.group().begin_group("all_to_all", [&](NcclComm* comm) {
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

  // Calls until one fails. Inside a group NCCL returns success; a communicator that is being made returns in_progress.
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

}  // namespace

std::unique_ptr<Operation> make_nccl_collective(NcclBackend& backend, const OperationDescription& description) {
  return std::make_unique<NcclCollective>(backend, description);
}

}  // namespace phalanx
