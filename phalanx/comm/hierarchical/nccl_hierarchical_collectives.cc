// The stages of each collective, on M nodes with G ranks each. "lane": between the ranks of one place.
//   all_reduce      inside: reduce_scatter of the tensor into G slices; lane: all_reduce of the slice; inside:
//                   all_gather of the slices
//   reduce          the same, with a reduce to the root's node, where the slices are sent to the root
//   reduce_scatter  inside, for each node m: reduce_scatter of the parts of m's ranks; lane: reduce_scatter of the M
//                   sums that a rank has now
//   all_gather      lane: all_gather; inside, for each node m: all_gather of the parts that came from m
//   broadcast       lane of the root: broadcast; inside: broadcast
//   gather, scatter, all_to_all    a message for each pair, inside the node or between two
// The average is that of the nodes' averages, which are over equally many ranks.
#include <algorithm>

#include "phalanx/comm/hierarchical/hierarchical_backend.h"
#include "phalanx/comm/hierarchical/nccl_hierarchical_backend.h"
#include "phalanx/comm/slices.h"

namespace phalanx {
namespace {

class NcclPlan {
 public:
  NcclPlan(NcclHierarchicalBackend& backend, const OperationDescription& d, std::vector<at::Tensor>& memory)
      : backend_(backend),
        layout_(backend.layout()),
        d_(d),
        memory_(memory),
        width_(static_cast<std::int64_t>(element_size(d.dtype))),
        rank_(backend.rank()),
        node_(backend.node()),
        local_rank_(backend.local_rank()),
        nodes_(layout_.nodes()),
        local_size_(layout_.lanes()) {}

  std::vector<NcclStage> stages() {
    switch (d_.verb) {
      case Verb::broadcast:
        broadcast();
        break;
      case Verb::all_reduce:
        all_reduce();
        break;
      case Verb::reduce:
        reduce();
        break;
      case Verb::reduce_scatter:
        reduce_scatter();
        break;
      case Verb::all_gather:
        all_gather();
        break;
      case Verb::gather:
        gather();
        break;
      case Verb::scatter:
        scatter();
        break;
      case Verb::all_to_all:
        all_to_all();
        break;
      default:
        break;  // barrier: all have come
    }
    return std::move(stages_);
  }

 private:
  std::byte* output(std::int64_t element) const { return static_cast<std::byte*>(d_.output) + element * width_; }
  const std::byte* input(std::int64_t element) const {
    return static_cast<const std::byte*>(d_.input) + element * width_;
  }
  std::byte* make_memory(std::int64_t elements) {
    memory_.push_back(backend_.device_memory(std::max<std::int64_t>(elements * width_, 1)));
    return static_cast<std::byte*>(memory_.back().mutable_data_ptr());
  }
  int rank_at(int node, int local_rank) const { return layout_.members(node)[static_cast<std::size_t>(local_rank)]; }
  static std::int64_t begin_of(Range range) { return static_cast<std::int64_t>(range.begin); }
  static std::int64_t length_of(Range range) { return static_cast<std::int64_t>(range.size()); }

  OperationDescription collective(Verb verb) const {
    OperationDescription d;
    d.verb = verb;
    d.dtype = d_.dtype;
    d.op = d_.op;
    d.on_device = true;
    return d;
  }
  // A stage of its own; what moves nothing is left out, on all ranks of the group below alike.
  void add(Backend& transport, OperationDescription d) {
    d.sequence =
        &transport == &backend_.intra_node() ? backend_.next_intra_node_sequence() : backend_.next_lane_sequence();
    stages_.emplace_back().parts.push_back({&transport, std::move(d), nullptr});
  }

  Range slice(int local_rank) const {
    return slice_of(static_cast<std::size_t>(d_.output_count), local_size_, local_rank);
  }
  std::vector<std::int64_t> slices() const {
    std::vector<std::int64_t> counts;
    for (int local_rank = 0; local_rank < local_size_; ++local_rank) counts.push_back(length_of(slice(local_rank)));
    return counts;
  }
  // The tensor is added up inside; `sum`: this rank's slice of it.
  void add_up_slices(std::byte* sum) {
    OperationDescription d = collective(Verb::reduce_scatter);
    d.input = d_.output;
    d.input_count = d_.output_count;
    d.output = sum;
    d.output_count = length_of(slice(local_rank_));
    d.counts = slices();
    add(backend_.intra_node(), std::move(d));
  }

  void all_reduce() {
    if (d_.output_count == 0) return;
    std::byte* mine = output(begin_of(slice(local_rank_)));
    const std::int64_t count = length_of(slice(local_rank_));
    add_up_slices(mine);
    if (count > 0) {
      OperationDescription d = collective(Verb::all_reduce);
      d.output = mine;
      d.output_count = count;
      add(backend_.lane(), std::move(d));
    }
    OperationDescription d = collective(Verb::all_gather);
    d.input = mine;
    d.input_count = count;
    d.output = d_.output;
    d.output_count = d_.output_count;
    d.counts = slices();
    add(backend_.intra_node(), std::move(d));
  }

  void reduce() {
    if (d_.output_count == 0) return;
    const int to = layout_.node_of(d_.root), root_local_rank = layout_.local_rank_of(d_.root);
    const std::int64_t count = length_of(slice(local_rank_));
    std::byte* sum = make_memory(count);  // the tensor itself is only read, but on the root
    add_up_slices(sum);
    if (count > 0) {
      OperationDescription d = collective(Verb::reduce);
      d.root = to;
      d.output = sum;
      d.output_count = count;
      add(backend_.lane(), std::move(d));
    }
    if (node_ != to) return;
    Messages messages(*this);
    if (local_rank_ != root_local_rank)
      messages.send(sum, count, d_.root);
    else
      for (int local_rank = 0; local_rank < local_size_; ++local_rank)
        messages.receive(output(begin_of(slice(local_rank))), length_of(slice(local_rank)), rank_at(node_, local_rank));
    if (local_rank_ == root_local_rank) messages.copy(output(begin_of(slice(local_rank_))), sum, count);
    messages.add();
  }

  // Of reduce_scatter's input and all_gather's output: the part of a rank, and those of a node.
  Range part(int of) const {
    return part_of(d_.counts, d_.verb == Verb::reduce_scatter ? d_.output_count : d_.input_count, of);
  }
  Range shards_of_node(int node) const {
    return {part(layout_.members(node).front()).begin, part(layout_.members(node).back()).end};
  }
  std::vector<std::int64_t> counts_of_node(int node) const {
    std::vector<std::int64_t> counts;
    for (const int rank : layout_.members(node)) counts.push_back(length_of(part(rank)));
    return counts;
  }
  std::vector<std::int64_t> counts_of_lane() const {
    std::vector<std::int64_t> counts;
    for (int m = 0; m < nodes_; ++m) counts.push_back(length_of(part(rank_at(m, local_rank_))));
    return counts;
  }

  void reduce_scatter() {
    const std::vector<std::int64_t> across = counts_of_lane();
    std::int64_t total = 0;
    for (const std::int64_t count : across) total += count;
    std::byte* sums = make_memory(total);
    std::int64_t at = 0;
    for (int m = 0; m < nodes_; at += across[static_cast<std::size_t>(m++)]) {
      const Range parts = shards_of_node(m);
      if (parts.size() == 0) continue;
      OperationDescription d = collective(Verb::reduce_scatter);
      d.input = input(begin_of(parts));
      d.input_count = length_of(parts);
      d.output = sums + at * width_;
      d.output_count = across[static_cast<std::size_t>(m)];
      if (!d_.counts.empty()) d.counts = counts_of_node(m);
      add(backend_.intra_node(), std::move(d));
    }
    if (total == 0) return;
    OperationDescription d = collective(Verb::reduce_scatter);
    d.input = sums;
    d.input_count = total;
    d.output = d_.output;
    d.output_count = d_.output_count;
    if (!d_.counts.empty()) d.counts = across;
    add(backend_.lane(), std::move(d));
  }

  void all_gather() {
    const std::vector<std::int64_t> across = counts_of_lane();
    std::int64_t total = 0;
    for (const std::int64_t count : across) total += count;
    std::byte* parts_of_lane = make_memory(total);
    if (total > 0) {
      OperationDescription d = collective(Verb::all_gather);
      d.input = d_.input;
      d.input_count = d_.input_count;
      d.output = parts_of_lane;
      d.output_count = total;
      if (!d_.counts.empty()) d.counts = across;
      add(backend_.lane(), std::move(d));
    }
    std::int64_t at = 0;
    for (int m = 0; m < nodes_; at += across[static_cast<std::size_t>(m++)]) {
      const Range parts = shards_of_node(m);
      if (parts.size() == 0) continue;
      OperationDescription d = collective(Verb::all_gather);
      d.input = parts_of_lane + at * width_;
      d.input_count = across[static_cast<std::size_t>(m)];
      d.output = output(begin_of(parts));
      d.output_count = length_of(parts);
      if (!d_.counts.empty()) d.counts = counts_of_node(m);
      add(backend_.intra_node(), std::move(d));
    }
  }

  void broadcast() {
    if (d_.output_count == 0) return;
    OperationDescription d = collective(Verb::broadcast);
    d.output = d_.output;
    d.output_count = d_.output_count;
    d.root = layout_.node_of(d_.root);
    if (local_rank_ == layout_.local_rank_of(d_.root)) add(backend_.lane(), d);
    d.root = layout_.local_rank_of(d_.root);
    add(backend_.intra_node(), std::move(d));
  }

  // Messages with any ranks of the group, and what stays here, in one stage.
  class Messages {
   public:
    explicit Messages(NcclPlan& plan) : plan_(plan) {}
    void send(const void* data, std::int64_t count, int peer) { add(true, const_cast<void*>(data), count, peer); }
    void receive(void* data, std::int64_t count, int peer) { add(false, data, count, peer); }
    void copy(void* to, const void* from, std::int64_t count) {
      if (count > 0 && to != from) stage_.copies.push_back({to, from, static_cast<std::size_t>(count * plan_.width_)});
    }
    void add() {
      for (auto* one : {&intra_node_, &inter_node_}) {
        if (one->empty()) continue;
        OperationDescription d;
        d.verb = Verb::batch_p2p;
        d.sequence = plan_.d_.sequence;
        d.on_device = true;
        d.transfers = std::move(*one);
        NcclHierarchicalBackend& backend = plan_.backend_;
        stage_.parts.push_back(
            {one == &intra_node_ ? &backend.intra_node() : &backend.staged_flat(), std::move(d), nullptr});
      }
      if (!stage_.parts.empty() || !stage_.copies.empty()) plan_.stages_.push_back(std::move(stage_));
    }

   private:
    void add(bool is_send, void* data, std::int64_t count, int peer) {
      if (count == 0 || peer == plan_.rank_) return;
      const bool is_local = plan_.layout_.node_of(peer) == plan_.node_;
      (is_local ? intra_node_ : inter_node_)
          .push_back({is_send, data, count, plan_.d_.dtype, is_local ? plan_.layout_.local_rank_of(peer) : peer,
                      kHierarchicalTag});
    }
    NcclPlan& plan_;
    NcclStage stage_;
    std::vector<Transfer> intra_node_, inter_node_;
  };

  void gather() {
    Messages messages(*this);
    if (rank_ != d_.root) {
      messages.send(d_.input, d_.input_count, d_.root);
    } else {
      for (int r = 0; r < layout_.ranks(); ++r) messages.receive(output(r * d_.input_count), d_.input_count, r);
      messages.copy(output(rank_ * d_.input_count), d_.input, d_.input_count);
    }
    messages.add();
  }

  void scatter() {
    Messages messages(*this);
    if (rank_ != d_.root) {
      messages.receive(d_.output, d_.output_count, d_.root);
    } else {
      for (int r = 0; r < layout_.ranks(); ++r) messages.send(input(r * d_.output_count), d_.output_count, r);
      messages.copy(d_.output, input(rank_ * d_.output_count), d_.output_count);
    }
    messages.add();
  }

  void all_to_all() {
    const std::int64_t even = d_.input_counts.empty() ? d_.input_count / layout_.ranks() : 0;
    Messages messages(*this);
    for (int r = 0; r < layout_.ranks(); ++r) {
      const Range to = part_of(d_.input_counts, even, r), from = part_of(d_.output_counts, even, r);
      messages.send(input(begin_of(to)), length_of(to), r);
      messages.receive(output(begin_of(from)), length_of(from), r);
      if (r == rank_) messages.copy(output(begin_of(from)), input(begin_of(to)), length_of(to));
    }
    messages.add();
  }

  NcclHierarchicalBackend& backend_;
  const NodeLayout& layout_;
  const OperationDescription& d_;
  std::vector<at::Tensor>& memory_;
  const std::int64_t width_;
  const int rank_, node_, local_rank_, nodes_, local_size_;
  std::vector<NcclStage> stages_;
};

}  // namespace

std::vector<NcclStage> plan_nccl_stages(NcclHierarchicalBackend& backend, const OperationDescription& description,
                                        std::vector<at::Tensor>& memory) {
  return NcclPlan(backend, description, memory).stages();
}

}  // namespace phalanx
