// Reductions of host memory in rank order, over nodes that each have a contiguous range of ranks.
//
// What the rank of a lane does for its piece of a chunk (reduction_chunks.h), on node m:
//   exchange    gets the inputs of all ranks of its node, inside the node
//   reduce      gets from node m - 1 what the ranks before this node add up to, adds the inputs of its own node in
//               their order, and sends the sum to node m + 1. 16-bit floats travel as float32. The last node has the
//               result; it divides it for avg, and rounds it.
//   return      all_reduce: the result goes back from node to node. reduce, reduce_scatter: the last node sends it
//               straight to the node that wants the chunk.
//   distribute  gives the result to the ranks of its node that want it, inside the node
// Chunk t is distributed after chunk t + lag has been exchanged, where lag is the way up and back in chunks. So all
// nodes work at the same time, and a rank needs memory for a few pieces only.
#include <array>

#include "phalanx/comm/hierarchical/reduction_chunks.h"

namespace phalanx {
namespace {

class RankOrderReduction {
 public:
  RankOrderReduction(HierarchicalBackend& backend, const OperationDescription& d, CollectiveSchedule& schedule)
      : backend_(backend),
        d_(d),
        schedule_(schedule),
        chunks_(backend, d, static_cast<std::size_t>(backend.tuning().piece_bytes)),
        width_(element_size(d.dtype)),
        acc_width_(element_size(accumulator_of(d.dtype))),
        node_(backend.node()),
        last_(backend.layout().nodes() - 1),
        local_size_(backend.local_members().size()),
        steps_(chunks_.all().size()) {}

  void add() {
    if (chunks_.is_lane()) make_rings();
    // The way of a chunk from here to the last node and back, and one more of each for what is being added.
    const std::size_t lag = 2 * static_cast<std::size_t>(last_ - node_) + 2;
    for (std::size_t t = 0; t < steps_.size() + lag; ++t) {
      if (t < steps_.size()) exchange_and_reduce(t);
      if (t >= lag) distribute(t - lag);
    }
  }

 private:
  using Id = CollectiveSchedule::Id;
  static constexpr std::size_t kRing = 3;  // pieces of each kind that are in memory
  struct Steps {                           // of one chunk
    Id exchanged = CollectiveSchedule::kNone, added = CollectiveSchedule::kNone, sent_up = CollectiveSchedule::kNone,
       has_result = CollectiveSchedule::kNone, sent_back = CollectiveSchedule::kNone,
       distributed = CollectiveSchedule::kNone;
    std::byte* result = nullptr;  // of this rank's piece
  };

  void make_rings() {
    const std::size_t longest = chunks_.longest_piece();
    for (std::size_t k = 0; k < kRing; ++k) {
      if (local_size_ > 1) inputs_[k] = schedule_.memory(longest * width_ * local_size_ + 1);
      sums_[k] = schedule_.memory(longest * acc_width_ + 1);
      if (d_.verb != Verb::all_reduce) results_[k] = schedule_.memory(longest * width_ + 1);
    }
  }

  // The last such step of a chunk whose memory chunk t uses again.
  Id before(std::size_t t, Id Steps::*what) const {
    while (t >= kRing)
      if (const Id id = steps_[t -= kRing].*what; id != CollectiveSchedule::kNone) return id;
    return CollectiveSchedule::kNone;
  }

  void exchange_and_reduce(std::size_t t) {
    if (backend_.intra_node() != nullptr) exchange_inputs(t);
    const Range mine = chunks_.own_piece(chunks_.all()[t]);
    if (mine.size() == 0) return;  // so on all nodes
    reduce(t, mine);
    return_result(t, mine.size() * width_);
  }

  void exchange_inputs(std::size_t t) {
    const ReductionChunks::Chunk& chunk = chunks_.all()[t];
    OperationDescription d;
    d.verb = Verb::all_to_all;
    d.dtype = d_.dtype;
    d.input = chunks_.source(chunk.begin);
    d.input_count = static_cast<std::int64_t>(chunk.count);
    const auto mine = static_cast<std::int64_t>(chunks_.own_piece(chunk).size());
    for (int local_rank = 0; local_rank < static_cast<int>(local_size_); ++local_rank) {
      const bool is_lane = local_rank < backend_.layout().lanes();
      d.input_counts.push_back(is_lane ? static_cast<std::int64_t>(chunks_.piece(chunk, local_rank).size()) : 0);
      d.output_counts.push_back(mine);
    }
    d.output = inputs_[t % kRing];
    d.output_count = mine * static_cast<std::int64_t>(local_size_);
    // As an even exchange it may read where the data lie.
    if (std::ranges::all_of(d.input_counts, [&](std::int64_t count) { return count == mine; })) {
      d.input_counts.clear();
      d.output_counts.clear();
    }
    steps_[t].exchanged = schedule_.intra_node(std::move(d), {before(t, &Steps::added)});
  }

  void reduce(std::size_t t, Range mine) {
    const std::size_t begin = chunks_.all()[t].begin + mine.begin;
    Steps& steps = steps_[t];
    std::byte* const sum = sums_[t % kRing];
    steps.result = d_.verb == Verb::all_reduce ? chunks_.output(begin) : results_[t % kRing];
    Id got = CollectiveSchedule::kNone;
    if (node_ > 0)
      got = schedule_.receive(sum, mine.size() * acc_width_, chunks_.rank_at(node_ - 1),
                              {before(t, &Steps::added), before(t, &Steps::sent_up)});
    std::vector<const std::byte*> inputs;
    inputs.reserve(local_size_);
    for (std::size_t k = 0; k < local_size_; ++k)
      inputs.push_back(local_size_ > 1 ? inputs_[t % kRing] + k * mine.size() * width_ : chunks_.source(begin));
    const bool is_last = node_ == last_;
    steps.added = schedule_.work(
        [sum, is_last, result = steps.result, count = mine.size(), inputs = std::move(inputs), dtype = d_.dtype,
         op = d_.op, is_first = node_ == 0, ranks = backend_.size()] {
          accumulate(dtype, op, sum, is_first, inputs, count);
          if (is_last) finish_sum(dtype, op, result, sum, count, ranks);
        },
        {steps.exchanged, got, before(t, &Steps::sent_up), before(t, &Steps::distributed),
         before(t, &Steps::sent_back)});
    if (is_last)
      steps.has_result = steps.added;
    else
      steps.sent_up = schedule_.send(sum, mine.size() * acc_width_, chunks_.rank_at(node_ + 1), {steps.added});
  }

  void return_result(std::size_t t, std::size_t bytes) {
    const int owner = chunks_.all()[t].owner_node;
    Steps& steps = steps_[t];
    if (owner < 0) {
      if (node_ < last_)
        steps.has_result = schedule_.receive(steps.result, bytes, chunks_.rank_at(node_ + 1), {steps.added});
      if (node_ > 0)
        steps.sent_back = schedule_.send(steps.result, bytes, chunks_.rank_at(node_ - 1), {steps.has_result});
    } else if (node_ == last_ && owner != last_) {
      steps.sent_back = schedule_.send(steps.result, bytes, chunks_.rank_at(owner), {steps.has_result});
    }
  }

  void distribute(std::size_t t) {
    const ReductionChunks::Chunk& chunk = chunks_.all()[t];
    if (!chunks_.is_wanted(chunk)) return;
    Steps& steps = steps_[t];
    // Here, as its memory must have been distributed before.
    const std::size_t bytes = chunks_.own_piece(chunk).size() * width_;
    if (chunk.owner_node >= 0 && node_ < last_ && bytes > 0)
      steps.has_result =
          schedule_.receive(steps.result, bytes, chunks_.rank_at(last_), {steps.added, before(t, &Steps::distributed)});
    if (!chunks_.is_dealt(chunk))
      steps.distributed = schedule_.intra_node(chunks_.deal(chunk, steps.result), {steps.has_result});
    else if (d_.verb != Verb::all_reduce)
      steps.distributed = schedule_.copy(chunks_.output_of(chunk), steps.result, bytes, {steps.has_result});
  }

  HierarchicalBackend& backend_;
  const OperationDescription& d_;
  CollectiveSchedule& schedule_;
  const ReductionChunks chunks_;
  const std::size_t width_, acc_width_;
  const int node_, last_;
  const std::size_t local_size_;
  std::vector<Steps> steps_;
  std::array<std::byte*, kRing> inputs_{}, sums_{}, results_{};
};

}  // namespace

void add_reduction_steps(HierarchicalBackend& backend, const OperationDescription& description,
                         CollectiveSchedule& schedule) {
  RankOrderReduction(backend, description, schedule).add();
}

}  // namespace phalanx
