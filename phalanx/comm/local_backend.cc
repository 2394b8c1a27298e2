#include "phalanx/comm/local_backend.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "phalanx/base/error.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/slices.h"
#include "phalanx/comm/wait.h"

namespace phalanx {
namespace {

// What all groups of one world share.
struct LocalWorld {
  explicit LocalWorld(int size) : gone(static_cast<std::size_t>(size)) {}
  std::vector<std::atomic<bool>> gone;  // ranks that have returned
  bool is_crowded = false;
};

// The memory of one group of rank threads.
struct LocalGroup {
  LocalGroup(std::shared_ptr<LocalWorld> its_world, std::vector<int> world_ranks)
      : world(std::move(its_world)),
        members(std::move(world_ranks)),
        ranks(members.size()),
        channels(members.size() * members.size()) {}
  bool has_gone(int rank) const { return world->gone[world_rank(rank)].load(std::memory_order_acquire); }
  std::size_t world_rank(int rank) const { return static_cast<std::size_t>(members[static_cast<std::size_t>(rank)]); }

  std::shared_ptr<LocalWorld> world;
  std::vector<int> members;
  BoardHead head{};
  std::vector<RankBoard> ranks;
  std::vector<Channel> channels;
};

class LocalCollective final : public RoundOperation {
 public:
  using RoundOperation::RoundOperation;

  // After a failure. A rank works on its peers' buffers only if it has seen all ranks publish the first round and then
  // no abort. So if the abort is visible, and some rank has not published after that, no rank ever will work. Otherwise
  // some may be at it: each says so when it needs our buffers no longer, as we do here.
  bool retire() noexcept override {
    if (!has_published()) return true;
    if (!board_.aborted()) return false;  // another thread is writing down the reason
    if (board_.round() == first_round_) {
      const auto first = static_cast<std::uint32_t>(first_round_);
      // Read-modify-write: in one order with the peers' publishing and their look at the abort.
      for (int peer = 0; peer < board_.size(); ++peer)
        is_alone_ |=
            static_cast<std::int32_t>(board_.of(peer).published.fetch_add(0, std::memory_order_seq_cst) - first) < 0;
      board_.of(board_.rank()).left_in.store(first, std::memory_order_release);
      board_.publish(first_round_ + 1);
    }
    return is_alone_ || board_.first_behind(first_round_ + 1) < 0;
  }

 private:
  static constexpr std::size_t kPiece = 1U << 20;  // bytes of a slice reduced at a time by one step
  static constexpr std::size_t kTile = 1U << 14;   // reduced, then copied to the peers while in the first cache

  Progress step() override {
    if (!is_work_done_) {
      if (!ignores_abort_) board_.throw_if_aborted();
      ignores_abort_ = true;
      is_work_done_ = work();
      if (!is_work_done_) return Progress::moved;
      board_.publish(first_round_ + 1);
    }
    if (!await_all(first_round_ + 1)) return Progress::blocked;
    if (!error_.empty()) throw CommError(error_);
    // A peer may have let go of our buffers without having done its part.
    if (board_.aborted())
      for (int peer = 0; peer < board_.size(); ++peer)
        if (board_.of(peer).left_in.load(std::memory_order_acquire) == static_cast<std::uint32_t>(first_round_))
          board_.throw_if_aborted();
    return Progress::done;
  }

  const OperationDescription& peer(int rank) const { return *board_.header(rank, first_round_).description; }
  std::size_t width() const { return element_size(description_.dtype); }
  std::byte* output() const { return static_cast<std::byte*>(description_.output); }

  // memmove's cost, memcpy's name: the own part may be in place already.
  static void copy(void* to, const void* from, std::size_t bytes) {
    if (to != from && bytes > 0) std::memcpy(to, from, bytes);
  }

  bool work() {
    switch (description_.verb) {
      case Verb::broadcast:
        if (board_.rank() != description_.root) copy_from(description_.root, 0, 0, description_.output_count);
        return true;
      case Verb::all_reduce:
      case Verb::reduce:
        return reduce_slice();
      case Verb::reduce_scatter:
        return reduce_own_part();
      case Verb::all_gather:
        for_each_peer([&](int r) {
          const Range part = part_of(description_.counts, description_.input_count, r);
          copy(output() + part.begin * width(), peer(r).input, part.size() * width());
        });
        return true;
      case Verb::gather:
        if (board_.rank() == description_.root) {
          for_each_peer([&](int r) {
            const std::size_t bytes = static_cast<std::size_t>(description_.input_count) * width();
            copy(output() + static_cast<std::size_t>(r) * bytes, peer(r).input, bytes);
          });
        }
        return true;
      case Verb::scatter:
        copy_from(description_.root, description_.output_count * board_.rank(), 0, description_.output_count);
        return true;
      case Verb::all_to_all:
        if (!counts_match()) return true;
        for_each_peer([&](int r) {
          const auto even = description_.input_count / board_.size();
          const Range from = part_of(peer(r).input_counts, even, board_.rank());
          const Range to = part_of(description_.output_counts, even, r);
          copy(output() + to.begin * width(), static_cast<const std::byte*>(peer(r).input) + from.begin * width(),
               to.size() * width());
        });
        return true;
      default:
        return true;
    }
  }

  // Starts with the next rank, so that all do not read the same one at once.
  template <class Body>
  void for_each_peer(Body body) const {
    for (int k = 1; k <= board_.size(); ++k) body((board_.rank() + k) % board_.size());
  }

  // Elements [at, at + count) of a rank's input (or of its output, where that is what the verb reads).
  void copy_from(int rank, std::int64_t at, std::int64_t to, std::int64_t count) const {
    const OperationDescription& source = peer(rank);
    const void* data = description_.verb == Verb::broadcast ? source.output : source.input;
    copy(output() + static_cast<std::size_t>(to) * width(),
         static_cast<const std::byte*>(data) + static_cast<std::size_t>(at) * width(),
         static_cast<std::size_t>(count) * width());
  }

  bool counts_match() {
    if (description_.input_counts.empty()) return true;
    std::vector<const std::int64_t*> inputs;
    std::vector<const std::int64_t*> outputs;
    for (int r = 0; r < board_.size(); ++r) {
      inputs.push_back(peer(r).input_counts.data());
      outputs.push_back(peer(r).output_counts.data());
    }
    error_ = all_to_all_mismatch(inputs, outputs);
    return error_.empty();
  }

  bool reduce_slice() {
    const Range slice = slice_of(static_cast<std::size_t>(description_.output_count), board_.size(), board_.rank());
    const bool to_all = description_.verb == Verb::all_reduce;
    return reduce_range(
        slice, [&](const OperationDescription& d) { return static_cast<std::byte*>(d.output); },
        [&](std::size_t begin, int writer, const std::byte* tile, std::size_t bytes) {
          if (!to_all) return;
          for_each_peer([&](int r) {
            if (r != writer) std::memcpy(static_cast<std::byte*>(peer(r).output) + begin, tile, bytes);
          });
        },
        to_all ? board_.rank() : description_.root,
        [&](int writer) { return static_cast<std::byte*>(peer(writer).output); });
  }

  bool reduce_own_part() {
    const Range part = part_of(description_.counts, description_.output_count, board_.rank());
    return reduce_range(
        part, [](const OperationDescription& d) { return static_cast<const std::byte*>(d.input); },
        [](std::size_t, int, const std::byte*, std::size_t) {}, board_.rank(),
        [&](int) { return output() - part.begin * width(); });
  }

  // Reduces elements of `range` from every rank's source into the writer's target, a piece a call.
  template <class Source, class Spread, class Target>
  bool reduce_range(Range range, Source source, Spread spread, int writer, Target target) {
    const ReduceKernel kernel = reduce_kernel(description_.dtype, description_.op);
    inputs_.resize(static_cast<std::size_t>(board_.size()));
    const std::size_t tile = kTile / width();
    const std::size_t piece_end = std::min(range.end, range.begin + done_ + kPiece / width());
    std::size_t at = range.begin + done_;
    for (; at < piece_end; at += tile) {
      const std::size_t count = std::min(tile, piece_end - at);
      for (int r = 0; r < board_.size(); ++r) inputs_[static_cast<std::size_t>(r)] = source(peer(r)) + at * width();
      std::byte* out = target(writer) + at * width();
      kernel(out, inputs_.data(), board_.size(), count);
      spread(at * width(), writer, out, count * width());
    }
    done_ = piece_end - range.begin;
    return piece_end == range.end;
  }

  bool is_work_done_ = false;
  bool is_alone_ = false;  // when it failed, some rank had not come
  std::size_t done_ = 0;
  std::string error_;  // thrown only when no peer reads our description any more
  std::vector<const void*> inputs_;
};

class LocalBackend final : public Backend {
 public:
  LocalBackend(std::shared_ptr<LocalGroup> group, int rank)
      : group_(std::move(group)),
        board_({&group_->head, group_->ranks.data(), group_, false}, rank, static_cast<int>(group_->ranks.size()),
               [this](int peer) {
                 return group_->has_gone(peer) ? std::string("has returned and will not come") : std::string();
               }),
        mail_(board_, {group_->channels.data(), nullptr, 0}) {}

  int rank() const noexcept override { return board_.rank(); }
  int size() const noexcept override { return board_.size(); }
  BackendTraits traits() const noexcept override {
    return {.name = "local", .rank_order_reduction = true, .host_only = true, .crowded = group_->world->is_crowded};
  }
  std::unique_ptr<Operation> start(const OperationDescription& description) override {
    if (description.verb == Verb::send || description.verb == Verb::recv || description.verb == Verb::batch_p2p)
      return std::make_unique<PeerOperation>(mail_, description);
    return std::make_unique<LocalCollective>(board_, description);
  }
  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    // The first member makes the group and hands its address round; the second exchange says that all hold it.
    std::shared_ptr<LocalGroup> group;
    std::string address(sizeof(void*), '\0');
    if (request.rank == 0) {
      std::vector<int> members;
      for (int member : request.members) members.push_back(group_->members[static_cast<std::size_t>(member)]);
      group = std::make_shared<LocalGroup>(group_->world, std::move(members));
      const auto* holder = &group;
      std::memcpy(address.data(), &holder, sizeof(holder));
    }
    const std::vector<std::string> addresses = request.exchange(address);
    if (request.rank > 0) {
      const std::shared_ptr<LocalGroup>* holder = nullptr;
      std::memcpy(&holder, addresses[static_cast<std::size_t>(request.members[0])].data(), sizeof(holder));
      group = *holder;
    }
    request.exchange("");
    if (request.members.empty()) return nullptr;
    return std::make_shared<LocalBackend>(std::move(group), request.rank);
  }
  void abort(const std::string& reason) noexcept override { board_.abort(reason); }
  void check_ranks() override { board_.check_ranks(); }
  void mark_gone() noexcept {
    group_->world->gone[group_->world_rank(board_.rank())].store(true, std::memory_order_release);
  }

 private:
  std::shared_ptr<LocalGroup> group_;
  Board board_;
  PeerMail mail_;
};

}  // namespace

std::vector<std::shared_ptr<Backend>> make_local_backends(int size) {
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  auto world = std::make_shared<LocalWorld>(size);
  world->is_crowded = size > available_cores();
  auto group = std::make_shared<LocalGroup>(std::move(world), std::move(members));
  std::vector<std::shared_ptr<Backend>> backends;
  for (int rank = 0; rank < size; ++rank) backends.push_back(std::make_shared<LocalBackend>(group, rank));
  return backends;
}

void mark_local_rank_gone(Backend& backend) noexcept { static_cast<LocalBackend&>(backend).mark_gone(); }

}  // namespace phalanx
