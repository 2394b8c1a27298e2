// Reductions in rank order over several nodes, each of which has a contiguous range of ranks.
//
// The data go in chunks, and a chunk in one piece for each lane (ranks of the same place on their nodes). For each
// chunk, on node m:
//   bring     the ranks of the node bring their inputs of a piece to its lane (inside)
//   up        the lane gets from node m - 1 what the ranks before this node add up to,
//   add       adds the inputs of its node in their order, and sends that to node m + 1.
//             16-bit floats go up as float32. The last node has the result, divides it for avg, and rounds it.
//   down      all_reduce: results go back down from node to node; reduce and reduce_scatter: from the last one
//             straight to the node that wants the chunk
//   deal      the results of all lanes go to whoever wants them (inside)
// Chunk t is dealt after chunk t + lag has been brought, where lag is the way up and down in chunks: so all nodes
// are at work at the same time, and a rank needs memory for a few pieces only.
#include <algorithm>
#include <array>

#include "phalanx/comm/hierarchical/collective_schedule.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/slices.h"

namespace phalanx {
namespace {

constexpr std::size_t kPiecesInMemory = 3;  // pieces of each kind that are in memory
constexpr std::size_t kWideTile = 4096;     // elements of 16-bit floats that are in float32 at a time

template <class T>
void divide_all(void* values, std::size_t count, int by) {
  auto* data = static_cast<T*>(values);
  for (std::size_t i = 0; i < count; ++i) data[i] = data[i] / static_cast<T>(by);
}

// acc = (first ? nothing : acc) op inputs[0] op inputs[1] ..., in the accumulator's type.
void add_inputs(DataType dtype, ReduceOp op, void* acc, bool is_first, const std::vector<const std::byte*>& inputs,
                std::size_t count) {
  const ReduceOp by = op == ReduceOp::avg ? ReduceOp::sum : op;
  const bool is_wide = dtype == DataType::f16 || dtype == DataType::bf16;
  std::vector<const void*> sources;
  if (!is_wide) {
    if (!is_first) sources.push_back(acc);
    sources.insert(sources.end(), inputs.begin(), inputs.end());
    reduce_kernel(dtype, by)(acc, sources.data(), static_cast<int>(sources.size()), count);
    return;
  }
  const ReduceKernel kernel = reduce_kernel(DataType::f32, by);
  std::array<float, kWideTile> wide;
  for (std::size_t at = 0; at < count; at += kWideTile) {
    const std::size_t length = std::min(kWideTile, count - at);
    float* sum = static_cast<float*>(acc) + at;
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      const bool opens = is_first && k == 0;
      widen_floats(dtype, opens ? sum : wide.data(), inputs[k] + at * element_size(dtype), length);
      if (opens) continue;
      const std::array<const void*, 2> both{sum, wide.data()};
      kernel(sum, both.data(), 2, length);
    }
  }
}

// The result of all ranks, from the accumulator's type to the elements'.
void finish_sum(DataType dtype, ReduceOp op, void* result, void* acc, std::size_t count, int ranks) {
  const bool is_wide = dtype == DataType::f16 || dtype == DataType::bf16;
  if (op == ReduceOp::avg) {
    if (dtype == DataType::f64)
      divide_all<double>(acc, count, ranks);
    else
      divide_all<float>(acc, count, ranks);
  }
  if (is_wide)
    narrow_floats(dtype, result, static_cast<const float*>(acc), count);
  else if (result != acc)
    std::copy_n(static_cast<const std::byte*>(acc), count * element_size(dtype), static_cast<std::byte*>(result));
}

class ReductionSchedule {
 public:
  ReductionSchedule(HierarchicalBackend& backend, const OperationDescription& d, CollectiveSchedule& schedule)
      : backend_(backend),
        layout_(backend.layout()),
        d_(d),
        schedule_(schedule),
        width_(element_size(d.dtype)),
        acc_width_(d.dtype == DataType::f16 || d.dtype == DataType::bf16 ? sizeof(float) : width_),
        rank_(backend.rank()),
        node_(backend.node()),
        last_(layout_.nodes() - 1),
        local_rank_(layout_.local_rank_of(rank_)),
        local_size_(static_cast<int>(backend.local_members().size())),
        lanes_(layout_.lanes()),
        is_lane_(local_rank_ < lanes_) {}

  void add() {
    divide_into_chunks();
    if (is_lane_) make_rings();
    // The way of a chunk from here to the last node and back, and one more of each for what is being added.
    const std::size_t lag = 2 * static_cast<std::size_t>(last_ - node_) + 2;
    for (std::size_t t = 0; t < chunks_.size() + lag; ++t) {
      if (t < chunks_.size()) exchange_and_reduce(t);
      if (t >= lag) distribute_results(t - lag);
    }
  }

 private:
  using Id = CollectiveSchedule::Id;
  struct Chunk {
    std::size_t begin = 0, count = 0;  // elements
    int owner_node = -1;               // the node that wants the result; -1: all
    Id exchanged = CollectiveSchedule::kNone, added = CollectiveSchedule::kNone, sent_up = CollectiveSchedule::kNone,
       has_result = CollectiveSchedule::kNone, sent_down = CollectiveSchedule::kNone,
       distributed = CollectiveSchedule::kNone;
    std::byte* result = nullptr;  // of the own lane's piece
  };

  const std::byte* source() const {
    return static_cast<const std::byte*>(d_.verb == Verb::reduce_scatter ? d_.input : d_.output);
  }
  std::byte* output() const { return static_cast<std::byte*>(d_.output); }
  Range piece(const Chunk& chunk, int lane) const { return slice_of(chunk.count, lanes_, lane); }
  int rank_at(int node) const { return layout_.members(node)[static_cast<std::size_t>(local_rank_)]; }
  bool wants(const Chunk& chunk) const { return chunk.owner_node < 0 || chunk.owner_node == node_; }
  // Elements of reduce_scatter's input that are for one rank.
  Range slice_for(int rank) const { return part_of(d_.counts, d_.output_count, rank); }

  void divide_into_chunks() {
    const std::size_t per_lane =
        std::max<std::size_t>(static_cast<std::size_t>(backend_.tuning().piece_bytes) / acc_width_ / 64 * 64, 64);
    const auto divide_range = [&](std::size_t begin, std::size_t end, int owner_node) {
      const std::size_t most = per_lane * static_cast<std::size_t>(lanes_);
      for (std::size_t at = begin; at < end; at += most) {
        Chunk& chunk = chunks_.emplace_back();
        chunk.begin = at;
        chunk.count = std::min(most, end - at);
        chunk.owner_node = owner_node;
      }
    };
    if (d_.verb != Verb::reduce_scatter)
      return divide_range(0, static_cast<std::size_t>(d_.output_count),
                          d_.verb == Verb::reduce ? layout_.node_of(d_.root) : -1);
    for (int node = 0; node <= last_; ++node)
      divide_range(slice_for(layout_.members(node).front()).begin, slice_for(layout_.members(node).back()).end, node);
  }

  void make_rings() {
    std::size_t longest = 0;
    for (const Chunk& chunk : chunks_) longest = std::max(longest, piece(chunk, local_rank_).size());
    for (std::size_t k = 0; k < kPiecesInMemory; ++k) {
      if (local_size_ > 1) inputs_[k] = schedule_.memory(longest * width_ * static_cast<std::size_t>(local_size_) + 1);
      sums_[k] = schedule_.memory(longest * acc_width_ + 1);
      if (d_.verb != Verb::all_reduce) results_[k] = schedule_.memory(longest * width_ + 1);
    }
  }

  // What was done kPiecesInMemory chunks ago, in the memory that is used again now.
  Id before(std::size_t t, Id Chunk::*what) const {
    return t < kPiecesInMemory ? CollectiveSchedule::kNone : chunks_[t - kPiecesInMemory].*what;
  }

  void exchange_and_reduce(std::size_t t) {
    Chunk& chunk = chunks_[t];
    if (backend_.intra_node() != nullptr) exchange_inputs(t);
    if (!is_lane_) return;
    const Range mine = piece(chunk, local_rank_);
    if (mine.size() == 0) return;  // so on all nodes
    add_up(t, mine);
    send_down(t, mine);
  }

  void exchange_inputs(std::size_t t) {
    Chunk& chunk = chunks_[t];
    OperationDescription d;
    d.verb = Verb::all_to_all;
    d.dtype = d_.dtype;
    d.input = source() + chunk.begin * width_;
    d.input_count = static_cast<std::int64_t>(chunk.count);
    const std::size_t mine = is_lane_ ? piece(chunk, local_rank_).size() : 0;
    for (int local_rank = 0; local_rank < local_size_; ++local_rank) {
      d.input_counts.push_back(local_rank < lanes_ ? static_cast<std::int64_t>(piece(chunk, local_rank).size()) : 0);
      d.output_counts.push_back(static_cast<std::int64_t>(mine));
    }
    d.output = inputs_[t % kPiecesInMemory];
    d.output_count = static_cast<std::int64_t>(mine) * local_size_;
    // As an even exchange it may read where the data lie.
    const auto is_mine = [&](std::int64_t count) { return count == d.output_counts.front(); };
    if (std::all_of(d.input_counts.begin(), d.input_counts.end(), is_mine)) {
      d.input_counts.clear();
      d.output_counts.clear();
    }
    chunk.exchanged = schedule_.intra_node(std::move(d), {before(t, &Chunk::added)});
  }

  void add_up(std::size_t t, Range mine) {
    Chunk& chunk = chunks_[t];
    std::byte* sum = sums_[t % kPiecesInMemory];
    Id got = CollectiveSchedule::kNone;
    if (node_ > 0)
      got = schedule_.receive(sum, mine.size() * acc_width_, rank_at(node_ - 1),
                              {before(t, &Chunk::added), before(t, &Chunk::sent_up)});
    std::vector<const std::byte*> inputs;
    inputs.reserve(static_cast<std::size_t>(local_size_));
    for (int local_rank = 0; local_rank < local_size_; ++local_rank)
      inputs.push_back(local_size_ > 1
                           ? inputs_[t % kPiecesInMemory] + static_cast<std::size_t>(local_rank) * mine.size() * width_
                           : source() + (chunk.begin + mine.begin) * width_);
    chunk.result =
        d_.verb == Verb::all_reduce ? output() + (chunk.begin + mine.begin) * width_ : results_[t % kPiecesInMemory];
    const bool is_last = node_ == last_;
    chunk.added = schedule_.work(
        [sum, is_last, result = chunk.result, count = mine.size(), inputs = std::move(inputs), dtype = d_.dtype,
         op = d_.op, is_first = node_ == 0, ranks = layout_.ranks()] {
          add_inputs(dtype, op, sum, is_first, inputs, count);
          if (is_last) finish_sum(dtype, op, result, sum, count, ranks);
        },
        {chunk.exchanged, got, before(t, &Chunk::sent_up), before(t, &Chunk::distributed),
         before(t, &Chunk::sent_down)});
    if (is_last)
      chunk.has_result = chunk.added;
    else
      chunk.sent_up = schedule_.send(sum, mine.size() * acc_width_, rank_at(node_ + 1), {chunk.added});
  }

  void send_down(std::size_t t, Range mine) {
    Chunk& chunk = chunks_[t];
    const std::size_t bytes = mine.size() * width_;
    if (chunk.owner_node < 0) {
      if (node_ < last_) chunk.has_result = schedule_.receive(chunk.result, bytes, rank_at(node_ + 1), {chunk.added});
      if (node_ > 0) chunk.sent_down = schedule_.send(chunk.result, bytes, rank_at(node_ - 1), {chunk.has_result});
    } else if (node_ == last_ && chunk.owner_node != last_) {
      chunk.sent_down = schedule_.send(chunk.result, bytes, rank_at(chunk.owner_node), {chunk.has_result});
    }
  }

  // Elements of the chunk that a lane has and the rank at `local_rank` of this node wants.
  std::int64_t share(const Chunk& chunk, int lane, int local_rank) const {
    if (lane >= lanes_) return 0;
    const int rank = backend_.local_members()[static_cast<std::size_t>(local_rank)];
    const Range has{chunk.begin + piece(chunk, lane).begin, chunk.begin + piece(chunk, lane).end};
    if (d_.verb == Verb::reduce) return rank == d_.root ? static_cast<std::int64_t>(has.size()) : 0;
    const Range wanted = slice_for(rank);
    const std::size_t begin = std::max(has.begin, wanted.begin), end = std::min(has.end, wanted.end);
    return end > begin ? static_cast<std::int64_t>(end - begin) : 0;
  }

  // Where in the output this rank's share of the chunk begins.
  std::byte* output_position(const Chunk& chunk) const {
    if (d_.verb != Verb::reduce_scatter) return output() + chunk.begin * width_;
    const std::size_t begin = slice_for(rank_).begin;
    return output() + (std::max(chunk.begin, begin) - begin) * width_;
  }

  void distribute_results(std::size_t t) {
    Chunk& chunk = chunks_[t];
    if (!wants(chunk)) return;
    // Not before the memory that it needs has been dealt out.
    const std::size_t mine = is_lane_ ? piece(chunk, local_rank_).size() : 0;
    if (chunk.owner_node >= 0 && node_ < last_ && mine > 0)
      chunk.has_result =
          schedule_.receive(chunk.result, mine * width_, rank_at(last_), {chunk.added, before(t, &Chunk::distributed)});
    if (backend_.intra_node() == nullptr) {
      if (d_.verb == Verb::all_reduce || chunk.count == 0) return;
      // Alone on its node, so the only one that can want it.
      chunk.distributed = schedule_.work([to = output_position(chunk), from = chunk.result,
                                          bytes = chunk.count * width_] { std::copy_n(from, bytes, to); },
                                         {chunk.has_result});
      return;
    }
    OperationDescription d;
    d.dtype = d_.dtype;
    if (d_.verb == Verb::all_reduce) {
      d.verb = Verb::all_gather;
      for (int local_rank = 0; local_rank < local_size_; ++local_rank)
        d.counts.push_back(local_rank < lanes_ ? static_cast<std::int64_t>(piece(chunk, local_rank).size()) : 0);
      d.output = output() + chunk.begin * width_;
      d.output_count = static_cast<std::int64_t>(chunk.count);
      d.input_count = d.counts[static_cast<std::size_t>(local_rank_)];
      d.input = output() + (chunk.begin + (is_lane_ ? piece(chunk, local_rank_).begin : 0)) * width_;
    } else {
      d.verb = Verb::all_to_all;
      for (int local_rank = 0; local_rank < local_size_; ++local_rank) {
        d.input_counts.push_back(share(chunk, local_rank_, local_rank));
        d.output_counts.push_back(share(chunk, local_rank, local_rank_));
        d.input_count += d.input_counts.back();
        d.output_count += d.output_counts.back();
      }
      d.input = chunk.result;
      d.output = output_position(chunk);
    }
    chunk.distributed = schedule_.intra_node(std::move(d), {chunk.has_result});
  }

  HierarchicalBackend& backend_;
  const NodeLayout& layout_;
  const OperationDescription& d_;
  CollectiveSchedule& schedule_;
  const std::size_t width_, acc_width_;
  const int rank_, node_, last_, local_rank_, local_size_, lanes_;
  const bool is_lane_;
  std::vector<Chunk> chunks_;
  std::array<std::byte*, kPiecesInMemory> inputs_{}, sums_{}, results_{};
};

}  // namespace

void add_reduction_steps(HierarchicalBackend& backend, const OperationDescription& description,
                         CollectiveSchedule& schedule) {
  ReductionSchedule(backend, description, schedule).add();
}

}  // namespace phalanx
