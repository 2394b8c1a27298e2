// Collectives over MPI's non-blocking calls. With S ranks:
//   broadcast, all_gather, gather, scatter, all_to_all    MPI's own
//   all_reduce, reduce, reduce_scatter                    MPI's own if its order and its arithmetic suffice (mpi.h);
//     else in rank order: all-to-all of slices, our kernels, and for all_reduce an all-gather of the slices, chunk by
//     chunk; small ones in one all-gather of everything
//   barrier                                               the signatures
// If a call's int counts are too small, the same bytes are sent as messages of at most that many elements.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/mpi/mpi_backend.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/signature.h"
#include "phalanx/comm/slices.h"

namespace phalanx {
namespace {

constexpr std::size_t kSmallMpiReduction = 64 * 1024;  // bytes of all ranks together: every rank gathers everything
constexpr std::size_t kMpiReductionChunk = 8U << 20;   // bytes of a reduction in rank order that are in flight at once

// For reducing by MPI; never for 16-bit floats.
MPI_Datatype number_of(DataType type) {
  switch (type) {
    case DataType::f32:
      return mpi().float_type;
    case DataType::f64:
      return mpi().double_type;
    case DataType::i32:
      return mpi().int32;
    case DataType::i64:
      return mpi().int64;
    default:
      return mpi().uint8;
  }
}

MPI_Op mpi_op_of(DataType type, ReduceOp op) {
  const bool is_bool = type == DataType::boolean;
  switch (op) {
    case ReduceOp::sum:
      return is_bool ? mpi().lor : mpi().sum;
    case ReduceOp::avg:
      return mpi().sum;
    case ReduceOp::min:
      return is_bool ? mpi().land : mpi().min;
    case ReduceOp::max:
      return is_bool ? mpi().lor : mpi().max;
    case ReduceOp::product:
      return is_bool ? mpi().land : mpi().prod;
  }
  return mpi().sum;
}

// True if MPI's own reduction keeps the communicator's contract.
bool mpi_can_reduce(DataType type, ReduceOp op) {
  if (type == DataType::f16 || type == DataType::bf16) return false;
  const bool is_float = type == DataType::f32 || type == DataType::f64;
  return !is_float || (op != ReduceOp::min && op != ReduceOp::max);
}

void copy_mpi_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

class MpiCollective final : public MpiOperation {
 public:
  MpiCollective(MpiBackend& backend, const OperationDescription& description)
      : MpiOperation(backend),
        d_(description),
        size_(static_cast<std::size_t>(backend.size())),
        rank_(static_cast<std::size_t>(backend.rank())),
        element_(element_size(description.dtype)),
        mover_(mover_of(description.dtype)),
        limit_(static_cast<std::size_t>(backend.setup().largest_call)),
        index_(backend.begin_collective()) {}

  Progress advance() override {
    backend_.throw_if_aborted();
    const auto inside = backend_.process().try_enter();
    if (!inside || !requests_.are_done()) return Progress::blocked;
    moves_data_ = false;
    return next() ? Progress::moved : Progress::done;
  }

  void check_peers() override {
    MpiOperation::check_peers();
    if (phase_ != Phase::compare) return;
    const auto inside = backend_.process().try_enter();
    if (!inside || requests_.are_done()) return;
    if (const std::string why = backend_.stall_reason(); !why.empty() && !requests_.are_done())
      throw CommError(fmt::format("the ranks do not call the same operation: {}", why));
  }
  std::vector<int> missing_ranks() override { return backend_.behind(index_); }

 protected:
  bool are_requests_done() override { return requests_.are_done(); }
  bool is_callers_memory_in_use() const override { return moves_data_ && !requests_.is_empty(); }
  void leave_requests() noexcept override { requests_.leave(); }

 private:
  enum class Phase : std::uint8_t { signature, compare, counts, data };
  // One step of moving the data; false: nothing is in flight, and all is done.
  using Step = bool (MpiCollective::*)();

  std::size_t bytes(std::size_t count) const { return count * element_; }
  std::byte* output(std::size_t element = 0) const { return static_cast<std::byte*>(d_.output) + bytes(element); }
  const std::byte* input(std::size_t element = 0) const {
    return static_cast<const std::byte*>(d_.input) + bytes(element);
  }
  bool is_root() const { return backend_.rank() == d_.root; }
  int peer(std::size_t r) const { return static_cast<int>(r); }

  // Does one step. False when all is done.
  bool next() {
    if (size_ == 1) {
      // With one rank, reductions, broadcast and barrier change nothing.
      if (d_.input != nullptr && d_.output != nullptr && !d_.compare_only)
        copy_mpi_bytes(d_.output, d_.input, bytes(static_cast<std::size_t>(d_.output_count)));
      return false;
    }
    switch (phase_) {
      case Phase::signature: {
        const Signature mine = signature_of(d_);
        all_gather_header(&mine, sizeof mine);
        phase_ = Phase::compare;
        return true;
      }
      case Phase::compare: {
        std::vector<Signature> signatures(size_);
        std::memcpy(signatures.data(), header_, size_ * sizeof(Signature));
        require_equal_signatures(signatures);
        if (d_.verb == Verb::all_to_all && !d_.input_counts.empty()) {
          std::vector<std::int64_t> counts = d_.input_counts;
          counts.insert(counts.end(), d_.output_counts.begin(), d_.output_counts.end());
          all_gather_header(counts.data(), counts.size() * sizeof(std::int64_t));
          phase_ = Phase::counts;
          return true;
        }
        break;
      }
      case Phase::counts:
        compare_counts();
        break;
      case Phase::data:
        ++step_;
        return (this->*data_)();
    }
    requests_.clear();
    if (d_.compare_only) return false;
    phase_ = Phase::data;
    data_ = choose();
    return data_ != nullptr && (this->*data_)();
  }

  void all_gather_header(const void* mine, std::size_t length) {
    std::byte* own = requests_.bytes(length);
    std::memcpy(own, mine, length);
    header_ = requests_.bytes(length * size_);
    requests_.call("MPI_Iallgather",
                   mpi().iallgather(own, static_cast<int>(length), mpi().byte, header_, static_cast<int>(length),
                                    mpi().byte, backend_.comm(), requests_.next()));
  }

  void compare_counts() {
    const auto* counts = reinterpret_cast<const std::int64_t*>(header_);
    std::vector<const std::int64_t*> inputs, outputs;
    for (std::size_t r = 0; r < size_; ++r) {
      inputs.push_back(counts + r * 2 * size_);
      outputs.push_back(inputs.back() + size_);
      for (const std::int64_t* row : {inputs.back(), outputs.back()}) {
        std::size_t total = 0;
        for (std::size_t k = 0; k < size_; ++k) total += static_cast<std::size_t>(row[k]);
        largest_total_ = std::max(largest_total_, total);
      }
    }
    if (const std::string text = all_to_all_mismatch(inputs, outputs); !text.empty()) throw CommError(text);
  }

  // Depends only on what is the same on all ranks. Null if there is nothing to move.
  Step choose() {
    const bool by_mpi = !backend_.setup().deterministic && mpi_can_reduce(d_.dtype, d_.op);
    count_ = static_cast<std::size_t>(d_.output_count);
    switch (d_.verb) {
      case Verb::broadcast:
        return count_ == 0 ? nullptr : &MpiCollective::broadcast;
      case Verb::all_reduce:
      case Verb::reduce:
        if (count_ == 0) return nullptr;
        if (by_mpi) return &MpiCollective::reduce_by_mpi;
        if (bytes(count_) * size_ <= kSmallMpiReduction && count_ * size_ <= limit_)
          return &MpiCollective::reduce_small;
        return &MpiCollective::reduce_in_order;
      case Verb::reduce_scatter:
        if (d_.input_count == 0) return nullptr;
        if (by_mpi && static_cast<std::size_t>(d_.input_count) <= limit_) return &MpiCollective::reduce_scatter_by_mpi;
        return &MpiCollective::reduce_scatter_in_order;
      case Verb::all_gather:
        return count_ == 0 ? nullptr : &MpiCollective::all_gather;
      case Verb::gather:
        return d_.input_count == 0 ? nullptr : &MpiCollective::gather;
      case Verb::scatter:
        return count_ == 0 ? nullptr : &MpiCollective::scatter;
      case Verb::all_to_all:
        if (d_.input_counts.empty()) largest_total_ = static_cast<std::size_t>(d_.input_count);
        return largest_total_ == 0 ? nullptr : &MpiCollective::all_to_all;
      default:
        return nullptr;  // barrier: all ranks have arrived
    }
  }

  // --- moving -------------------------------------------------------------------------------------------------------

  void send_pieces(std::size_t to, const std::byte* data, std::size_t count) {
    for (std::size_t at = 0; at < count; at += limit_)
      requests_.call("MPI_Isend",
                     mpi().isend(data + bytes(at), static_cast<int>(std::min(limit_, count - at)), mover_, peer(to),
                                 backend_.tag(MpiTag::other, kMpiPieces), backend_.comm(), requests_.next()));
  }
  void receive_pieces(std::size_t from, std::byte* data, std::size_t count) {
    for (std::size_t at = 0; at < count; at += limit_)
      requests_.call("MPI_Irecv",
                     mpi().irecv(data + bytes(at), static_cast<int>(std::min(limit_, count - at)), mover_, peer(from),
                                 backend_.tag(MpiTag::other, kMpiPieces), backend_.comm(), requests_.next()));
  }

  // What each rank sends to and receives from each other: element counts and offsets.
  struct Parts {
    std::vector<Range> of;
    std::vector<int> counts() const {
      std::vector<int> result;
      for (const Range& range : of) result.push_back(static_cast<int>(range.size()));
      return result;
    }
    std::vector<int> begins() const {
      std::vector<int> result;
      for (const Range& range : of) result.push_back(static_cast<int>(range.begin));
      return result;
    }
  };

  // `fits`: the same on every rank.
  void exchange(const std::byte* in, const Parts& from, std::byte* out, const Parts& to, bool fits) {
    moves_data_ = true;
    if (fits) {
      requests_.call("MPI_Ialltoallv",
                     mpi().ialltoallv(in, requests_.ints(from.counts()), requests_.ints(from.begins()), mover_, out,
                                      requests_.ints(to.counts()), requests_.ints(to.begins()), mover_, backend_.comm(),
                                      requests_.next()));
      return;
    }
    copy_mpi_bytes(out + bytes(to.of[rank_].begin), in + bytes(from.of[rank_].begin), bytes(to.of[rank_].size()));
    for (std::size_t r = 0; r < size_; ++r)
      if (r != rank_) receive_pieces(r, out + bytes(to.of[r].begin), to.of[r].size());
    for (std::size_t r = 0; r < size_; ++r)
      if (r != rank_) send_pieces(r, in + bytes(from.of[r].begin), from.of[r].size());
  }

  // Sends every rank's part of `data` to all others. This rank's part is in its place already.
  void share(std::byte* data, const Parts& parts, bool fits) {
    moves_data_ = true;
    if (fits) {
      requests_.call("MPI_Iallgatherv",
                     mpi().iallgatherv(MPI_IN_PLACE, 0, mover_, data, requests_.ints(parts.counts()),
                                       requests_.ints(parts.begins()), mover_, backend_.comm(), requests_.next()));
      return;
    }
    for (std::size_t r = 0; r < size_; ++r)
      if (r != rank_) receive_pieces(r, data + bytes(parts.of[r].begin), parts.of[r].size());
    for (std::size_t r = 0; r < size_; ++r)
      if (r != rank_) send_pieces(r, data + bytes(parts.of[rank_].begin), parts.of[rank_].size());
  }

  // Sends the parts to the root, whose own part is in its place already. `data` is everything on the root, and this
  // rank's part elsewhere.
  void collect(std::byte* data, const Parts& parts) {
    moves_data_ = true;
    if (!is_root()) return send_pieces(static_cast<std::size_t>(d_.root), data, parts.of[rank_].size());
    for (std::size_t r = 0; r < size_; ++r)
      if (r != rank_) receive_pieces(r, data + bytes(parts.of[r].begin), parts.of[r].size());
  }

  bool broadcast() {
    const std::size_t begin = static_cast<std::size_t>(step_) * limit_;
    if (begin >= count_) return false;
    moves_data_ = true;
    requests_.call("MPI_Ibcast", mpi().ibcast(output(begin), static_cast<int>(std::min(limit_, count_ - begin)), mover_,
                                              d_.root, backend_.comm(), requests_.next()));
    return true;
  }

  bool all_gather() {
    if (step_ > 0) return false;
    Parts parts;
    for (std::size_t r = 0; r < size_; ++r) parts.of.push_back(part_of(d_.counts, d_.input_count, peer(r)));
    copy_mpi_bytes(output(parts.of[rank_].begin), d_.input, bytes(parts.of[rank_].size()));
    if (d_.counts.empty() && count_ <= limit_) {
      moves_data_ = true;
      const int own = static_cast<int>(d_.input_count);
      requests_.call("MPI_Iallgather", mpi().iallgather(MPI_IN_PLACE, 0, mover_, d_.output, own, mover_,
                                                        backend_.comm(), requests_.next()));
    } else {
      share(output(), parts, count_ <= limit_);
    }
    return true;
  }

  bool gather() {
    if (step_ > 0) return false;
    const auto own = static_cast<std::size_t>(d_.input_count);
    if (is_root()) copy_mpi_bytes(output(rank_ * own), d_.input, bytes(own));
    if (own * size_ <= limit_) {
      moves_data_ = true;
      requests_.call("MPI_Igather",
                     mpi().igather(is_root() ? MPI_IN_PLACE : d_.input, static_cast<int>(own), mover_, d_.output,
                                   static_cast<int>(own), mover_, d_.root, backend_.comm(), requests_.next()));
      return true;
    }
    Parts parts;
    for (std::size_t r = 0; r < size_; ++r) parts.of.push_back({r * own, (r + 1) * own});
    collect(is_root() ? output() : const_cast<std::byte*>(input()), parts);
    return true;
  }

  bool scatter() {
    if (step_ > 0) return false;
    moves_data_ = true;
    if (is_root()) copy_mpi_bytes(d_.output, input(rank_ * count_), bytes(count_));
    if (count_ * size_ <= limit_) {
      const int own = static_cast<int>(count_);
      requests_.call("MPI_Iscatter", mpi().iscatter(d_.input, own, mover_, is_root() ? MPI_IN_PLACE : d_.output, own,
                                                    mover_, d_.root, backend_.comm(), requests_.next()));
      return true;
    }
    if (!is_root()) {
      receive_pieces(static_cast<std::size_t>(d_.root), output(), count_);
      return true;
    }
    for (std::size_t r = 0; r < size_; ++r)
      if (r != rank_) send_pieces(r, input(r * count_), count_);
    return true;
  }

  bool all_to_all() {
    if (step_ > 0) return false;
    const std::int64_t even = d_.input_count / static_cast<std::int64_t>(size_);
    if (d_.input_counts.empty() && largest_total_ <= limit_) {
      moves_data_ = true;
      requests_.call("MPI_Ialltoall",
                     mpi().ialltoall(d_.input, static_cast<int>(even), mover_, d_.output, static_cast<int>(even),
                                     mover_, backend_.comm(), requests_.next()));
      return true;
    }
    Parts from, to;
    for (std::size_t r = 0; r < size_; ++r) {
      from.of.push_back(part_of(d_.input_counts, even, peer(r)));
      to.of.push_back(part_of(d_.output_counts, even, peer(r)));
    }
    exchange(input(), from, output(), to, largest_total_ <= limit_);
    return true;
  }

  // --- reducing -----------------------------------------------------------------------------------------------------

  void divide(std::byte* data, std::size_t count) const {
    if (d_.op != ReduceOp::avg) return;
    if (d_.dtype == DataType::f32) {
      auto* values = reinterpret_cast<float*>(data);
      for (std::size_t i = 0; i < count; ++i) values[i] /= static_cast<float>(size_);
    } else {
      auto* values = reinterpret_cast<double*>(data);
      for (std::size_t i = 0; i < count; ++i) values[i] /= static_cast<double>(size_);
    }
  }

  // `own` is this rank's input. `blocks` holds the others' one after the other, with a gap in this rank's position.
  void reduce_blocks(std::byte* out, const std::byte* own, const std::byte* blocks, std::size_t count) const {
    if (count == 0) return;
    std::vector<const void*> inputs;
    for (std::size_t r = 0; r < size_; ++r) inputs.push_back(r == rank_ ? own : blocks + r * bytes(count));
    reduce_kernel(d_.dtype, d_.op)(out, inputs.data(), static_cast<int>(size_), count);
  }

  bool reduce_by_mpi() {
    const std::size_t begin = static_cast<std::size_t>(step_) * limit_;
    if (begin >= count_) {
      if (d_.verb == Verb::all_reduce || is_root()) divide(output(), count_);
      return false;
    }
    moves_data_ = true;
    const int count = static_cast<int>(std::min(limit_, count_ - begin));
    const MPI_Datatype number = number_of(d_.dtype);
    const MPI_Op op = mpi_op_of(d_.dtype, d_.op);
    if (d_.verb == Verb::all_reduce)
      requests_.call("MPI_Iallreduce", mpi().iallreduce(MPI_IN_PLACE, output(begin), count, number, op, backend_.comm(),
                                                        requests_.next()));
    else
      requests_.call("MPI_Ireduce",
                     mpi().ireduce(is_root() ? MPI_IN_PLACE : output(begin), is_root() ? output(begin) : nullptr, count,
                                   number, op, d_.root, backend_.comm(), requests_.next()));
    return true;
  }

  bool reduce_small() {
    if (step_ == 0) {
      blocks_ = requests_.bytes(bytes(count_) * size_);
      copy_mpi_bytes(blocks_ + rank_ * bytes(count_), d_.output, bytes(count_));
      const int count = static_cast<int>(count_);
      requests_.call("MPI_Iallgather", mpi().iallgather(MPI_IN_PLACE, 0, mover_, blocks_, count, mover_,
                                                        backend_.comm(), requests_.next()));
      return true;
    }
    if (d_.verb == Verb::all_reduce || is_root())
      reduce_blocks(output(), blocks_ + rank_ * bytes(count_), blocks_, count_);
    return false;
  }

  // Far below what one call can count.
  std::size_t chunk() const { return std::max(std::min(kMpiReductionChunk / element_, limit_), size_); }

  // Each rank reduces its slice of a chunk. Then all_reduce shares the slices, and reduce collects them.
  bool reduce_in_order() {
    const std::size_t begin = static_cast<std::size_t>(step_ / 2) * chunk();
    if (begin >= count_) return false;
    requests_.clear();
    const std::size_t length = std::min(chunk(), count_ - begin);
    Parts slices;
    for (std::size_t r = 0; r < size_; ++r) slices.of.push_back(slice_of(length, backend_.size(), peer(r)));
    const Range mine = slices.of[rank_];
    if (step_ % 2 == 0) {
      Parts from = slices, to;
      from.of[rank_].end = from.of[rank_].begin;  // what stays here is reduced in place
      for (std::size_t r = 0; r < size_; ++r)
        to.of.push_back({r * mine.size(), r * mine.size() + (r == rank_ ? 0 : mine.size())});
      const auto room = backend_.scratch(bytes((size_ + 1) * mine.size()));
      requests_.keep(room);
      blocks_ = room.get();
      exchange(output(begin), from, blocks_, to, true);
      return true;
    }
    const bool keeps_input = d_.verb == Verb::reduce && !is_root();  // only the root's tensor changes
    std::byte* result = keeps_input ? blocks_ + size_ * bytes(mine.size()) : output(begin + mine.begin);
    reduce_blocks(result, output(begin + mine.begin), blocks_, mine.size());
    if (d_.verb == Verb::all_reduce)
      share(output(begin), slices, true);
    else
      collect(keeps_input ? result : output(begin), slices);
    return true;
  }

  bool reduce_scatter_by_mpi() {
    // MPI requires that input and output do not overlap.
    const std::byte* own = input(part_of(d_.counts, d_.output_count, backend_.rank()).begin);
    const bool in_place = own == d_.output;
    if (step_ > 0) {
      if (in_place) copy_mpi_bytes(d_.output, blocks_, bytes(count_));
      divide(output(), count_);
      return false;
    }
    moves_data_ = true;
    if (in_place) blocks_ = requests_.bytes(bytes(count_));
    std::byte* out = in_place ? blocks_ : output();
    const MPI_Datatype number = number_of(d_.dtype);
    const MPI_Op op = mpi_op_of(d_.dtype, d_.op);
    if (d_.counts.empty()) {
      requests_.call("MPI_Ireduce_scatter_block",
                     mpi().ireduce_scatter_block(d_.input, out, static_cast<int>(count_), number, op, backend_.comm(),
                                                 requests_.next()));
    } else {
      const int* counts = requests_.ints({d_.counts.begin(), d_.counts.end()});
      requests_.call("MPI_Ireduce_scatter",
                     mpi().ireduce_scatter(d_.input, out, counts, number, op, backend_.comm(), requests_.next()));
    }
    return true;
  }

  // Processes the same range of every rank's part at a time.
  bool reduce_scatter_in_order() {
    const std::size_t longest =
        d_.counts.empty() ? count_ : static_cast<std::size_t>(*std::ranges::max_element(d_.counts));
    const std::size_t stretch = std::max<std::size_t>(chunk() / size_, 1);
    const auto stretch_of = [&](const Range& part, std::size_t begin) {
      return Range{std::min(part.begin + begin, part.end), std::min(part.begin + begin + stretch, part.end)};
    };
    const Range whole = part_of(d_.counts, d_.output_count, backend_.rank());
    const std::size_t begin = static_cast<std::size_t>(step_) * stretch;
    if (step_ > 0) {
      const Range before = stretch_of(whole, begin - stretch);
      reduce_blocks(output(before.begin - whole.begin), input(before.begin), blocks_, before.size());
    }
    if (begin >= longest) return false;
    requests_.clear();
    const Range mine = stretch_of(whole, begin);
    Parts from, to;
    for (std::size_t r = 0; r < size_; ++r) {
      const Range theirs = stretch_of(part_of(d_.counts, d_.output_count, peer(r)), begin);
      from.of.push_back(r == rank_ ? Range{theirs.begin, theirs.begin} : theirs);
      to.of.push_back({r * mine.size(), r * mine.size() + (r == rank_ ? 0 : mine.size())});
    }
    const auto room = backend_.scratch(bytes(size_ * mine.size()));
    requests_.keep(room);
    blocks_ = room.get();
    exchange(input(), from, blocks_, to, static_cast<std::size_t>(d_.input_count) <= limit_);
    return true;
  }

  const OperationDescription& d_;
  const std::size_t size_, rank_, element_;
  const MPI_Datatype mover_;
  const std::size_t limit_;    // elements of one call
  const std::uint64_t index_;  // number of this collective in the group
  Phase phase_ = Phase::signature;
  Step data_ = nullptr;
  int step_ = 0;
  std::size_t count_ = 0;          // output_count
  std::size_t largest_total_ = 0;  // all_to_all: what any rank sends or receives
  bool moves_data_ = false;        // the requests in flight use the caller's tensors
  std::byte* header_ = nullptr;
  std::byte* blocks_ = nullptr;
  MpiRequests requests_;
};

}  // namespace

std::unique_ptr<Operation> make_mpi_collective(MpiBackend& backend, const OperationDescription& description) {
  return std::make_unique<MpiCollective>(backend, description);
}

}  // namespace phalanx
