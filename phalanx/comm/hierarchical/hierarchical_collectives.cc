// What moves data without reducing them. With M nodes:
//   broadcast    from node to node in a line, beginning with the root's; one rank of each passes every piece to
//                the next node and to its own
//   all_gather   a rank sends its part to one rank of every other node, which passes it on inside; the work is dealt
//                out among the ranks of a node
//   gather, scatter, all_to_all    a message for each pair, inside the node or between two
// Whatever is passed on goes in pieces, so that the wire and the memory are busy at the same time.
#include <algorithm>
#include <cstring>

#include "phalanx/comm/hierarchical/collective_schedule.h"
#include "phalanx/comm/slices.h"

namespace phalanx {
namespace {

constexpr std::size_t kPeersAtOnce = 8;  // with which messages are under way, each way

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
        node_(backend.node()) {}

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

  void all_gather() {
    const auto part_of_rank = [&](int of) { return part(d_.counts, d_.input_count, of); };
    const auto receiver = [&](int node, int of) {
      const std::vector<int>& members = layout_.members(node);
      return members[static_cast<std::size_t>(layout_.local_rank_of(of)) % members.size()];
    };
    std::size_t longest = 0;
    for (int r = 0; r < size_; ++r) longest = std::max(longest, part_of_rank(r).size());
    for (std::size_t at = 0; at < longest; at += piece_) {
      // Piece by piece of all parts; the same order on all ranks.
      const auto length_of = [&](int of) {
        const std::size_t bytes = part_of_rank(of).size();
        return at < bytes ? std::min(piece_, bytes - at) : 0;
      };
      const auto destination = [&](int of) { return output() + part_of_rank(of).begin + at; };
      if (const std::size_t length = length_of(rank_); length > 0)
        for (int d = 1; d < layout_.nodes(); ++d)
          schedule_.send(input() + at, length, receiver(node_after(node_, d), rank_));
      for (const int of : backend_.local_members()) {
        const std::size_t length = length_of(of);
        if (length == 0) continue;
        pass_on(destination(of), length, of,
                of == rank_ ? copy(destination(of), input() + at, length) : CollectiveSchedule::kNone);
      }
      for (int d = 1; d < layout_.nodes(); ++d) {
        for (const int of : layout_.members(node_before(node_, d))) {
          const std::size_t length = length_of(of);
          if (length == 0) continue;
          const int by = receiver(node_, of);
          pass_on(destination(of), length, by,
                  by == rank_ ? schedule_.receive(destination(of), length, of) : CollectiveSchedule::kNone);
        }
      }
    }
  }

  // A piece of the own part.
  Id copy(void* to, const void* from, std::size_t bytes) {
    if (to == from || bytes == 0) return CollectiveSchedule::kNone;
    return schedule_.work([=] { std::memcpy(to, from, bytes); });
  }
  void copy_all(std::byte* to, const std::byte* from, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += piece_) copy(to + at, from + at, std::min(piece_, bytes - at));
  }

  // Messages with several peers, in an order that agrees on both sides; so many at once.
  class Window {
   public:
    Id after() const {
      return ids_.size() < kPeersAtOnce ? CollectiveSchedule::kNone : ids_[ids_.size() - kPeersAtOnce];
    }
    void add(Id id) { ids_.push_back(id); }

   private:
    std::vector<Id> ids_;
  };
  void send(Window& window, const std::byte* data, std::size_t bytes, int peer) {
    if (bytes > 0) window.add(schedule_.send(data, bytes, peer, {window.after()}));
  }
  void receive(Window& window, std::byte* data, std::size_t bytes, int peer) {
    if (bytes > 0) window.add(schedule_.receive(data, bytes, peer, {window.after()}));
  }

  void gather() {
    const std::size_t bytes = static_cast<std::size_t>(d_.input_count) * width_;
    Window window;
    if (rank_ != d_.root) return send(window, input(), bytes, d_.root);
    for (int d = 1; d < size_; ++d) {
      const int from = (rank_ + d) % size_;
      receive(window, output() + static_cast<std::size_t>(from) * bytes, bytes, from);
    }
    copy_all(output() + static_cast<std::size_t>(rank_) * bytes, input(), bytes);
  }

  void scatter() {
    const std::size_t bytes = static_cast<std::size_t>(d_.output_count) * width_;
    Window window;
    if (rank_ != d_.root) return receive(window, output(), bytes, d_.root);
    for (int d = 1; d < size_; ++d) {
      const int to = (rank_ + d) % size_;
      send(window, input() + static_cast<std::size_t>(to) * bytes, bytes, to);
    }
    copy_all(output(), input() + static_cast<std::size_t>(rank_) * bytes, bytes);
  }

  void all_to_all() {
    const std::int64_t even = d_.input_counts.empty() ? d_.input_count / size_ : 0;
    const auto outgoing = [&](int to) { return part(d_.input_counts, even, to); };
    const auto incoming = [&](int from) { return part(d_.output_counts, even, from); };
    Window sends, receives;
    for (int d = 1; d < size_; ++d) {
      const int to = (rank_ + d) % size_, from = (rank_ - d + size_) % size_;
      send(sends, input() + outgoing(to).begin, outgoing(to).size(), to);
      receive(receives, output() + incoming(from).begin, incoming(from).size(), from);
    }
    copy_all(output() + incoming(rank_).begin, input() + outgoing(rank_).begin, outgoing(rank_).size());
  }

  HierarchicalBackend& backend_;
  const NodeLayout& layout_;
  const OperationDescription& d_;
  CollectiveSchedule& schedule_;
  const std::size_t width_, piece_;
  const int rank_, size_, node_;
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

bool uses_hierarchy(const HierarchicalBackend& backend, const OperationDescription& d) {
  if (d.verb == Verb::barrier) return false;
  // Each rank knows only its own counts, and all must choose alike.
  if (d.verb == Verb::all_to_all && !d.input_counts.empty()) return true;
  const std::int64_t bytes = bytes_moved(d, backend.size());
  if (bytes == 0 || bytes < backend.tuning().smallest_bytes) return false;
  if (d.verb != Verb::all_reduce && d.verb != Verb::reduce && d.verb != Verb::reduce_scatter) return true;
  const NodeLayout& layout = backend.layout();
  return layout.is_contiguous() && (!backend.tuning().by_estimate || layout.is_chain_better(d.verb, d.dtype));
}

void add_data_steps(HierarchicalBackend& backend, const OperationDescription& description,
                    CollectiveSchedule& schedule) {
  DataSchedule(backend, description, schedule).add();
}

}  // namespace phalanx
