// The verbs that move data without reducing them. With M nodes:
//   broadcast    From node to node in a line, beginning with the root's node. One rank of each node passes every piece
//                to the next node and to its own.
//   all_gather   A rank sends its part to one rank of every other node, which passes it on inside its node.
//                The ranks of a node share that work.
//   gather, scatter, all_to_all    A message for each pair of ranks, inside the node or between two.
// What is passed on goes in pieces, so that the wire and the memory are busy at the same time. Only all_gather on a
// device passes on whole parts.
#include <algorithm>
#include <limits>

#include "phalanx/comm/hierarchical/collective_schedule.h"
#include "phalanx/comm/slices.h"

namespace phalanx {
namespace {

constexpr std::size_t kMessagesPerWay = 8;  // in flight with all peers together, in each direction

class DataSchedule {
 public:
  DataSchedule(HierarchicalBackend& backend, const OperationDescription& d, CollectiveSchedule& schedule)
      : backend_(backend),
        layout_(backend.layout()),
        d_(d),
        schedule_(schedule),
        width_(element_size(d.dtype)),
        piece_(static_cast<std::size_t>(backend.tuning().piece_bytes)),
        rank_(backend.rank()),
        size_(backend.size()),
        node_(backend.node()),
        local_rank_(layout_.local_rank_of(rank_)),
        messages_have_tags_(!backend.intra_node() || backend.intra_node()->traits().has_tags) {}

  void add() {
    switch (d_.verb) {
      case Verb::broadcast:
        return broadcast();
      case Verb::all_gather:
        return all_gather();
      case Verb::gather:
        return gather();
      case Verb::scatter:
        return scatter();
      case Verb::all_to_all:
        return all_to_all();
      default:
        return;  // barrier: all have come
    }
  }

 private:
  using Id = CollectiveSchedule::Id;
  const std::byte* input() const { return static_cast<const std::byte*>(d_.input); }
  std::byte* output() const { return static_cast<std::byte*>(d_.output); }
  // The d-th node after this one, or before it.
  int node_after(int from, int d) const { return (from + d) % layout_.nodes(); }
  int node_before(int from, int d) const { return (from - d + layout_.nodes()) % layout_.nodes(); }
  Range part(const std::vector<std::int64_t>& counts, std::int64_t even, int of) const {
    const Range range = part_of(counts, even, of);
    return {range.begin * width_, range.end * width_};
  }

  // To all ranks of this node, from the one that has it.
  void pass_on(std::byte* data, std::size_t bytes, int from, Id after) {
    if (backend_.intra_node() == nullptr) return;
    OperationDescription d;
    d.verb = Verb::broadcast;
    d.root = layout_.local_rank_of(from);
    d.output = data;
    d.output_count = static_cast<std::int64_t>(bytes);
    schedule_.intra_node(std::move(d), {after});
  }

  void broadcast() {
    const std::size_t bytes = static_cast<std::size_t>(d_.output_count) * width_;
    const int first = layout_.node_of(d_.root);
    const int distance = node_before(node_, first);
    const auto head_of = [&](int node) { return node == first ? d_.root : layout_.members(node).front(); };
    const int head = head_of(node_);
    for (std::size_t at = 0; at < bytes; at += piece_) {
      const std::size_t length = std::min(piece_, bytes - at);
      Id got = CollectiveSchedule::kNone;
      if (rank_ == head && distance > 0) got = schedule_.receive(output() + at, length, head_of(node_before(node_, 1)));
      if (rank_ == head && distance + 1 < layout_.nodes())
        schedule_.send(output() + at, length, head_of(node_after(node_, 1)), {got});
      pass_on(output() + at, length, head, got);
    }
  }

  Range gathered(int of) const { return part(d_.counts, d_.input_count, of); }
  // The rank of `node` that gets the part of a rank of another node.
  int receiver(int node, int of) const {
    const std::vector<int>& members = layout_.members(node);
    return members[static_cast<std::size_t>(layout_.local_rank_of(of)) % members.size()];
  }

  void all_gather() {
    std::size_t longest = 0;
    for (int r = 0; r < size_; ++r) longest = std::max(longest, gathered(r).size());
    // A device gains more from few operations than from pieces.
    const std::size_t piece = schedule_.on_device() ? std::max<std::size_t>(longest, 1) : piece_;
    // Piece by piece of all parts, in the same order on all ranks.
    for (std::size_t at = 0; at < longest; at += piece) {
      const auto length_of = [&](int of) {
        const std::size_t bytes = gathered(of).size();
        return at < bytes ? std::min(piece, bytes - at) : 0;
      };
      for (int d = 0; d < layout_.nodes(); ++d) {
        if (d > 0 && length_of(rank_) > 0) send_own(at, length_of(rank_), receiver(node_after(node_, d), rank_));
        const int from = node_before(node_, d);
        if (longest <= piece && is_one_all_gather(from))
          gather_whole_parts(from);
        else
          for (const int of : layout_.members(from))
            if (length_of(of) > 0) get_piece(of, at, length_of(of));
      }
    }
  }

  // From a device the own part is copied to the host once for all nodes.
  void send_own(std::size_t at, std::size_t length, int peer) {
    if (!schedule_.on_device()) {
      schedule_.send(input() + at, length, peer);
      return;
    }
    if (own_on_host_ == nullptr) {
      own_on_host_ = schedule_.memory(length);
      own_copied_ = schedule_.copy(own_on_host_, input() + at, length);
    }
    schedule_.send(own_on_host_, length, peer, {own_copied_}, CollectiveSchedule::Memory::host);
  }

  // Of the part of rank `of`; passed on inside.
  void get_piece(int of, std::size_t at, std::size_t length) {
    const int by = layout_.node_of(of) == node_ ? of : receiver(node_, of);
    std::byte* const to = output() + gathered(of).begin + at;
    Id got = CollectiveSchedule::kNone;
    if (by == rank_) got = of == rank_ ? schedule_.copy(to, input() + at, length) : schedule_.receive(to, length, of);
    pass_on(to, length, by, got);
  }

  // Whether the parts of that node lie side by side, and every one is at a rank of this node of its own.
  bool is_one_all_gather(int from) const {
    return backend_.intra_node() != nullptr && layout_.is_contiguous() &&
           layout_.members(from).size() <= layout_.members(node_).size();
  }
  void gather_whole_parts(int from) {
    const std::vector<int>& members = layout_.members(from);
    OperationDescription d;
    d.verb = Verb::all_gather;
    d.dtype = d_.dtype;
    d.output = output() + gathered(members.front()).begin;
    for (std::size_t l = 0; l < backend_.local_members().size(); ++l)
      d.counts.push_back(l < members.size() ? static_cast<std::int64_t>(gathered(members[l]).size() / width_) : 0);
    for (const std::int64_t count : d.counts) d.output_count += count;
    if (d.output_count == 0) return;
    Id got = CollectiveSchedule::kNone;
    const auto mine = static_cast<std::size_t>(local_rank_);
    d.input_count = d.counts[mine];
    if (from == node_) {
      d.input = d_.input;
    } else if (mine < members.size()) {
      const Range range = gathered(members[mine]);
      d.input = output() + range.begin;
      if (range.size() > 0) got = schedule_.receive(output() + range.begin, range.size(), members[mine]);
    }
    if (std::ranges::all_of(d.counts, [&](std::int64_t count) { return count == d.input_count; })) d.counts.clear();
    schedule_.intra_node(std::move(d), {got});
  }

  // Messages with many peers, in an order that agrees on both sides, a few at once.
  class Window {
   public:
    Id after() const {
      return ids_.size() < kMessagesPerWay ? CollectiveSchedule::kNone : ids_[ids_.size() - kMessagesPerWay];
    }
    void add(Id id) { ids_.push_back(id); }

   private:
    std::vector<Id> ids_;
  };
  void send(const std::byte* data, std::size_t bytes, int peer) {
    if (bytes == 0 || joins_batch(true, const_cast<std::byte*>(data), bytes, peer)) return;
    sends_.add(schedule_.send(data, bytes, peer, {sends_.after()}));
  }
  void receive(std::byte* data, std::size_t bytes, int peer) {
    if (bytes == 0 || joins_batch(false, data, bytes, peer)) return;
    receives_.add(schedule_.receive(data, bytes, peer, {receives_.after()}));
  }
  // Where a message waits for its peer, all messages of the node run together.
  bool joins_batch(bool is_send, std::byte* data, std::size_t bytes, int peer) {
    if (messages_have_tags_ || !backend_.is_local(peer)) return false;
    batch_.transfers.push_back(
        {is_send, data, static_cast<std::int64_t>(bytes), DataType::u8, layout_.local_rank_of(peer), kHierarchicalTag});
    return true;
  }
  void add_batch() {
    if (batch_.transfers.empty()) return;
    batch_.verb = Verb::batch_isend_irecv;
    batch_.on_device = schedule_.on_device();
    batch_.sequence = d_.sequence;
    schedule_.operation(*backend_.intra_node(), std::move(batch_));
  }
  // A rank's message to itself.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    const std::size_t piece = schedule_.on_device() ? bytes : piece_;
    for (std::size_t at = 0; at < bytes; at += piece) schedule_.copy(to + at, from + at, std::min(piece, bytes - at));
  }

  void gather() {
    const std::size_t bytes = static_cast<std::size_t>(d_.input_count) * width_;
    if (rank_ != d_.root) send(input(), bytes, d_.root);
    for (int d = 1; rank_ == d_.root && d < size_; ++d) {
      const int from = (rank_ + d) % size_;
      receive(output() + static_cast<std::size_t>(from) * bytes, bytes, from);
    }
    add_batch();
    if (rank_ == d_.root) copy(output() + static_cast<std::size_t>(rank_) * bytes, input(), bytes);
  }

  void scatter() {
    const std::size_t bytes = static_cast<std::size_t>(d_.output_count) * width_;
    if (rank_ != d_.root) receive(output(), bytes, d_.root);
    for (int d = 1; rank_ == d_.root && d < size_; ++d) {
      const int to = (rank_ + d) % size_;
      send(input() + static_cast<std::size_t>(to) * bytes, bytes, to);
    }
    add_batch();
    if (rank_ == d_.root) copy(output(), input() + static_cast<std::size_t>(rank_) * bytes, bytes);
  }

  void all_to_all() {
    const std::int64_t even = d_.input_counts.empty() ? d_.input_count / size_ : 0;
    const auto outgoing = [&](int to) { return part(d_.input_counts, even, to); };
    const auto incoming = [&](int from) { return part(d_.output_counts, even, from); };
    for (int d = 1; d < size_; ++d) {
      const int to = (rank_ + d) % size_, from = (rank_ - d + size_) % size_;
      send(input() + outgoing(to).begin, outgoing(to).size(), to);
      receive(output() + incoming(from).begin, incoming(from).size(), from);
    }
    add_batch();
    copy(output() + incoming(rank_).begin, input() + outgoing(rank_).begin, outgoing(rank_).size());
  }

  HierarchicalBackend& backend_;
  const NodeLayout& layout_;
  const OperationDescription& d_;
  CollectiveSchedule& schedule_;
  const std::size_t width_, piece_;
  const int rank_, size_, node_, local_rank_;
  const bool messages_have_tags_;  // inside the node: they match by tag, and several may be in flight
  Window sends_, receives_;
  OperationDescription batch_;
  std::byte* own_on_host_ = nullptr;
  Id own_copied_ = CollectiveSchedule::kNone;
};

// Bytes, by what all ranks know alike.
std::int64_t bytes_moved(const OperationDescription& d, int size) {
  const auto width = static_cast<std::int64_t>(element_size(d.dtype));
  switch (d.verb) {
    case Verb::gather:
      return d.input_count * size * width;
    case Verb::scatter:
      return d.output_count * size * width;
    case Verb::reduce_scatter:
    case Verb::all_to_all:
      return d.input_count * width;
    default:
      return d.output_count * width;
  }
}

}  // namespace

bool uses_hierarchy(const HierarchicalBackend& backend, const OperationDescription& d, bool on_device) {
  if (d.verb == Verb::barrier) return false;
  // Each rank knows only its own counts, and all must choose alike.
  if (d.verb == Verb::all_to_all && !d.input_counts.empty()) return true;
  const std::int64_t bytes = bytes_moved(d, backend.size());
  if (bytes == 0 || bytes < backend.tuning().smallest_bytes) return false;
  if (d.verb != Verb::all_reduce && d.verb != Verb::reduce && d.verb != Verb::reduce_scatter) return true;
  const NodeLayout& layout = backend.layout();
  if (on_device) return d.verb != Verb::reduce_scatter || layout.is_contiguous();
  return layout.is_contiguous() && (!backend.tuning().by_estimate || layout.is_chain_better(d.verb, d.dtype));
}

void add_data_steps(HierarchicalBackend& backend, const OperationDescription& description,
                    CollectiveSchedule& schedule) {
  DataSchedule(backend, description, schedule).add();
}

}  // namespace phalanx
