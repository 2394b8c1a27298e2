// Reductions of device memory: the backend of the node (nccl) adds up inside the node, the host adds up what the nodes
// have.
//
// What the rank of a lane does for its piece of a chunk (reduction_chunks.h):
//   sum         gets the sum of its node, by a reduce_scatter inside the node, and copies it to pinned memory
//   offer       all_reduce: the piece is cut into one slice for each node; every node sends its slices to their nodes.
//               reduce, reduce_scatter: every node sends its piece to the node that wants the chunk.
//   finish      adds up the slices of all nodes, in the order of the nodes: 16-bit floats in float32, rounded once.
//               all_reduce: sends the result to all other nodes. Copies the result to the device.
//   distribute  gives the result to the ranks of its node that want it, inside the node
// These phases of successive chunks overlap: while chunk t is added up inside the node, chunk t - 1 is on the wire.
// What a node has added up is rounded to the type of the elements before it leaves the device.
#include <numeric>

#include "phalanx/comm/hierarchical/reduction_chunks.h"

namespace phalanx {
namespace {

// Pieces for one node are smaller, as the node gets them from all others at once.
std::size_t piece_bytes(const HierarchicalBackend& backend, Verb verb) {
  const auto bytes = static_cast<std::size_t>(backend.tuning().piece_bytes);
  return verb == Verb::all_reduce ? bytes : bytes / static_cast<std::size_t>(backend.layout().nodes());
}

// Chunks that are in memory at a time. Those of a reduce_scatter are for each node in turn.
std::size_t chunks_in_memory(const HierarchicalBackend& backend, Verb verb) {
  return 3 * (verb == Verb::reduce_scatter ? static_cast<std::size_t>(backend.layout().nodes()) : 1);
}

class NodeSumReduction {
 public:
  NodeSumReduction(HierarchicalBackend& backend, const OperationDescription& d, CollectiveSchedule& schedule,
                   std::byte* scratch)
      : backend_(backend),
        d_(d),
        schedule_(schedule),
        chunks_(backend, d, piece_bytes(backend, d.verb)),
        scratch_(scratch),
        width_(element_size(d.dtype)),
        acc_width_(element_size(accumulator_of(d.dtype))),
        longest_(chunks_.longest_piece()),
        node_(backend.node()),
        nodes_(backend.layout().nodes()),
        ring_(chunks_in_memory(backend, d.verb)),
        steps_(chunks_.all().size()),
        sums_(ring_),
        inputs_(ring_),
        results_(ring_) {}

  void add() {
    if (chunks_.is_lane()) make_rings();
    for (std::size_t t = 0; t < steps_.size() + 2; ++t) {
      if (t < steps_.size()) sum_and_offer(t);
      if (t >= 1 && t - 1 < steps_.size()) finish(t - 1);
      if (t >= 2) distribute(t - 2);
    }
  }

 private:
  using Id = CollectiveSchedule::Id;
  using Chunk = ReductionChunks::Chunk;
  static constexpr auto kHost = CollectiveSchedule::Memory::host;
  struct Steps {  // of one chunk
    Id summed = CollectiveSchedule::kNone, on_host = CollectiveSchedule::kNone, offered = CollectiveSchedule::kNone,
       added = CollectiveSchedule::kNone, published = CollectiveSchedule::kNone, on_device = CollectiveSchedule::kNone,
       distributed = CollectiveSchedule::kNone;
    std::vector<Id> received;
  };

  void make_rings() {
    if (acc_width_ > width_) acc_ = schedule_.memory(longest_ * acc_width_);
    for (std::size_t t = 0; t < steps_.size(); ++t) {
      const std::size_t k = t % ring_;
      if (sums_[k] == nullptr) sums_[k] = schedule_.memory(longest_ * width_ + 1);
      if (inputs_[k] != nullptr || !chunks_.is_wanted(chunks_.all()[t])) continue;
      inputs_[k] = schedule_.memory(stride() * static_cast<std::size_t>(nodes_) + 1);
      results_[k] = schedule_.memory(longest_ * width_ + 1);
    }
  }

  // The last such step of a chunk whose memory chunk t uses again.
  Id before(std::size_t t, Id Steps::*what) const {
    while (t >= ring_)
      if (const Id id = steps_[t -= ring_].*what; id != CollectiveSchedule::kNone) return id;
    return CollectiveSchedule::kNone;
  }
  // The slice of a piece that a node adds up.
  Range slice(const Chunk& chunk, int node) const {
    const std::size_t count = chunks_.own_piece(chunk).size();
    if (chunk.owner_node < 0) return slice_of(count, nodes_, node);
    return {0, chunk.owner_node == node ? count : 0};
  }
  // Bytes between the slices of two nodes in inputs_.
  std::size_t stride() const {
    return (d_.verb == Verb::all_reduce ? slice_of(longest_, nodes_, 0).size() : longest_) * width_;
  }
  // Where this rank's piece is on the device.
  std::byte* on_device(std::size_t t) const {
    const Chunk& chunk = chunks_.all()[t];
    if (d_.verb == Verb::all_reduce) return chunks_.output(chunk.begin + chunks_.own_piece(chunk).begin);
    return scratch_ + t % ring_ * longest_ * width_;
  }

  void sum_and_offer(std::size_t t) {
    if (backend_.intra_node() != nullptr) sum(t);
    const Chunk& chunk = chunks_.all()[t];
    const Range mine = chunks_.own_piece(chunk);
    if (mine.size() == 0) return;  // so on all nodes
    Steps& steps = steps_[t];
    std::byte* const sums = sums_[t % ring_];
    const void* from = backend_.intra_node() != nullptr ? on_device(t) : chunks_.source(chunk.begin + mine.begin);
    steps.on_host = schedule_.copy(sums, from, mine.size() * width_,
                                   {steps.summed, before(t, &Steps::offered), before(t, &Steps::added)});
    std::vector<Id> sent;
    for (int d = 1; d < nodes_; ++d) {
      const int to = (node_ + d) % nodes_, from_node = (node_ - d + nodes_) % nodes_;
      const Range theirs = slice(chunk, to), ours = slice(chunk, node_);
      if (theirs.size() > 0)
        sent.push_back(schedule_.send(sums + theirs.begin * width_, theirs.size() * width_, chunks_.rank_at(to),
                                      {steps.on_host}, kHost));
      if (ours.size() > 0)
        steps.received.push_back(schedule_.receive(input_of(t, from_node), ours.size() * width_,
                                                   chunks_.rank_at(from_node), {before(t, &Steps::added)}, kHost));
    }
    steps.offered = schedule_.all(std::move(sent));
  }

  std::byte* input_of(std::size_t t, int node) const {
    return inputs_[t % ring_] + static_cast<std::size_t>(node) * stride();
  }

  void sum(std::size_t t) {
    const Chunk& chunk = chunks_.all()[t];
    OperationDescription d;
    d.verb = Verb::reduce_scatter;
    d.dtype = d_.dtype;
    d.op = d_.op;
    d.input = chunks_.source(chunk.begin);
    d.input_count = static_cast<std::int64_t>(chunk.count);
    d.output = chunks_.is_lane() ? on_device(t) : nullptr;
    d.output_count = static_cast<std::int64_t>(chunks_.own_piece(chunk).size());
    const auto local_size = static_cast<int>(backend_.local_members().size());
    for (int local_rank = 0; local_rank < local_size; ++local_rank)
      d.counts.push_back(local_rank < backend_.layout().lanes()
                             ? static_cast<std::int64_t>(chunks_.piece(chunk, local_rank).size())
                             : 0);
    if (std::ranges::all_of(d.counts, [&](std::int64_t count) { return count == d.counts.front(); })) d.counts.clear();
    steps_[t].summed = schedule_.intra_node(std::move(d), {before(t, &Steps::on_host), before(t, &Steps::distributed)});
  }

  void finish(std::size_t t) {
    const Chunk& chunk = chunks_.all()[t];
    const Range mine = chunks_.own_piece(chunk);
    if (mine.size() == 0 || !chunks_.is_wanted(chunk)) return;
    Steps& steps = steps_[t];
    std::byte* const result = results_[t % ring_];
    add_up(t, result);
    std::vector<Id> ready{steps.added}, sent;
    for (int d = 1; chunk.owner_node < 0 && d < nodes_; ++d) {
      const int to = (node_ + d) % nodes_, from = (node_ - d + nodes_) % nodes_;
      const Range ours = slice(chunk, node_), theirs = slice(chunk, from);
      if (ours.size() > 0)
        sent.push_back(schedule_.send(result + ours.begin * width_, ours.size() * width_, chunks_.rank_at(to),
                                      {steps.added}, kHost));
      if (theirs.size() > 0)
        ready.push_back(schedule_.receive(result + theirs.begin * width_, theirs.size() * width_, chunks_.rank_at(from),
                                          {before(t, &Steps::on_device), before(t, &Steps::published)}, kHost));
    }
    steps.published = schedule_.all(std::move(sent));
    const bool is_in_place = d_.verb != Verb::all_reduce && chunks_.is_dealt(chunk);
    void* const to = is_in_place ? chunks_.output_of(chunk) : on_device(t);
    steps.on_device = schedule_.copy(to, result, mine.size() * width_, std::move(ready));
  }

  void add_up(std::size_t t, std::byte* result) {
    const Range ours = slice(chunks_.all()[t], node_);
    if (ours.size() == 0) return;
    Steps& steps = steps_[t];
    std::vector<const std::byte*> inputs;
    inputs.reserve(static_cast<std::size_t>(nodes_));
    for (int node = 0; node < nodes_; ++node)
      inputs.push_back(node == node_ ? sums_[t % ring_] + ours.begin * width_ : input_of(t, node));
    CollectiveSchedule::After after = steps.received;
    for (const Id id : {steps.on_host, before(t, &Steps::on_device), before(t, &Steps::published)}) after.push_back(id);
    steps.added = schedule_.work(
        [acc = acc_ != nullptr ? acc_ : result + ours.begin * width_, result = result + ours.begin * width_,
         count = ours.size(), inputs = std::move(inputs), dtype = d_.dtype, op = d_.op, weights = node_weights()] {
          if (weights.empty())
            accumulate(dtype, op, acc, /*is_first=*/true, inputs, count);
          else
            add_weighted(dtype, acc, inputs, weights, count);
          finish_sum(dtype, op, result, acc, count, std::accumulate(weights.begin(), weights.end(), 0));
        },
        std::move(after));
  }

  // avg: NCCL has divided by the number of ranks of a node, so that a sum of float16 does not overflow.
  std::vector<int> node_weights() const {
    std::vector<int> weights;
    for (int node = 0; d_.op == ReduceOp::avg && node < nodes_; ++node)
      weights.push_back(static_cast<int>(backend_.layout().members(node).size()));
    return weights;
  }

  void distribute(std::size_t t) {
    const Chunk& chunk = chunks_.all()[t];
    if (!chunks_.is_wanted(chunk) || chunks_.is_dealt(chunk)) return;
    const std::byte* const result = chunks_.is_lane() ? on_device(t) : nullptr;
    steps_[t].distributed = schedule_.intra_node(chunks_.deal(chunk, result), {steps_[t].on_device});
  }

  HierarchicalBackend& backend_;
  const OperationDescription& d_;
  CollectiveSchedule& schedule_;
  const ReductionChunks chunks_;
  std::byte* const scratch_;
  const std::size_t width_, acc_width_, longest_;
  const int node_, nodes_;
  const std::size_t ring_;
  std::vector<Steps> steps_;
  std::vector<std::byte*> sums_, inputs_, results_;  // [ring_]: on the host
  std::byte* acc_ = nullptr;                         // for 16-bit floats
};

}  // namespace

void add_node_sum_steps(HierarchicalBackend& backend, const OperationDescription& description,
                        CollectiveSchedule& schedule, std::byte* scratch) {
  NodeSumReduction(backend, description, schedule, scratch).add();
}

std::size_t node_sum_scratch_bytes(HierarchicalBackend& backend, const OperationDescription& description) {
  if (description.verb == Verb::all_reduce || backend.intra_node() == nullptr) return 0;
  const ReductionChunks chunks(backend, description, piece_bytes(backend, description.verb));
  return chunks_in_memory(backend, description.verb) * chunks.longest_piece() * element_size(description.dtype);
}

}  // namespace phalanx
