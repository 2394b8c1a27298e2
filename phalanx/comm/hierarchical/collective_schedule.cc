#include "phalanx/comm/hierarchical/collective_schedule.h"

#include <algorithm>

namespace phalanx {

CollectiveSchedule::CollectiveSchedule(HierarchicalBackend& backend)
    : backend_(backend), ways_(2 * static_cast<std::size_t>(backend.size())) {}

CollectiveSchedule::~CollectiveSchedule() {
  steps_.clear();  // operations before the memory that they use
  for (auto& [bytes, memory] : memory_) backend_.release_buffer(std::move(memory), bytes);
}

std::byte* CollectiveSchedule::memory(std::size_t bytes) {
  memory_.emplace_back(bytes, backend_.acquire_buffer(bytes));
  return memory_.back().second.get();
}

CollectiveSchedule::Id CollectiveSchedule::add(Step step, After after) {
  for (const Id id : after)
    if (id != kNone && steps_[static_cast<std::size_t>(id)].state != State::done) step.after.push_back(id);
  steps_.push_back(std::move(step));
  return static_cast<Id>(steps_.size()) - 1;
}

CollectiveSchedule::Id CollectiveSchedule::intra_node(OperationDescription description, After after) {
  Step step;
  step.kind = Kind::intra_node;
  step.is_intra_node = true;
  step.description = std::move(description);
  step.description.sequence = backend_.next_intra_node_sequence();
  const OperationDescription& d = step.description;
  const bool gives_output = d.verb == Verb::broadcast && d.root == backend_.intra_node()->rank();
  step.sent = static_cast<std::size_t>(gives_output ? d.output_count : d.input_count) * element_size(d.dtype);
  return add(std::move(step), after);
}

CollectiveSchedule::Id CollectiveSchedule::send(const void* data, std::size_t bytes, int peer, After after) {
  return message(true, const_cast<void*>(data), bytes, peer, after);
}
CollectiveSchedule::Id CollectiveSchedule::receive(void* data, std::size_t bytes, int peer, After after) {
  return message(false, data, bytes, peer, after);
}

CollectiveSchedule::Id CollectiveSchedule::message(bool is_send, void* data, std::size_t bytes, int peer, After after) {
  Step step;
  step.kind = Kind::message;
  step.is_intra_node = backend_.is_local(peer);
  step.sent = is_send ? bytes : 0;
  step.description.verb = is_send ? Verb::send : Verb::recv;
  step.description.transfers.push_back({is_send, data, static_cast<std::int64_t>(bytes), DataType::u8,
                                        step.is_intra_node ? backend_.layout().local_rank_of(peer) : peer,
                                        kHierarchicalTag});
  return add(std::move(step), after);
}

CollectiveSchedule::Id CollectiveSchedule::work(std::function<void()> body, After after) {
  Step step;
  step.body = std::move(body);
  return add(std::move(step), after);
}

CollectiveSchedule::Id CollectiveSchedule::flat(const OperationDescription& description) {
  Step step;
  step.kind = Kind::flat;
  step.description = description;
  if (!description.compare_only) {
    // Not by what is null: the data of an empty tensor are, too.
    const Verb verb = description.verb;
    const bool is_in_place = verb == Verb::broadcast || verb == Verb::all_reduce || verb == Verb::reduce;
    if (verb != Verb::broadcast || description.root == backend_.rank())
      step.sent = static_cast<std::size_t>(is_in_place ? description.output_count : description.input_count) *
                  element_size(description.dtype);
  }
  return add(std::move(step), {});
}

CollectiveSchedule::Way& CollectiveSchedule::way_of(const Step& step) {
  const Transfer& transfer = step.description.transfers.front();
  const int peer =
      step.is_intra_node ? backend_.local_members()[static_cast<std::size_t>(transfer.peer)] : transfer.peer;
  return ways_[2 * static_cast<std::size_t>(peer) + (transfer.is_send ? 1 : 0)];
}

bool CollectiveSchedule::may_start(const Step& step) const {
  return std::ranges::all_of(step.after,
                             [&](Id id) { return steps_[static_cast<std::size_t>(id)].state == State::done; });
}

// True if it has begun.
bool CollectiveSchedule::start(Step& step) {
  if (!may_start(step)) return false;
  backend_.count(step.is_intra_node, step.sent);
  step.state = State::runs;
  if (step.kind != Kind::work)
    step.operation =
        step.is_intra_node ? backend_.intra_node()->start(step.description) : backend_.flat().start(step.description);
  return true;
}

Progress CollectiveSchedule::advance() {
  ++pass_;
  bool moved = false, intra_node_is_busy = false;
  const std::size_t end = std::min(steps_.size(), first_ + kWindow);
  for (std::size_t i = first_; i < end; ++i) {
    Step& step = steps_[i];
    if (step.state == State::waits) {
      if (step.kind == Kind::intra_node && intra_node_is_busy) continue;
      if (step.kind == Kind::message) {
        Way& way = way_of(step);
        const bool is_open = way.closed_in != pass_ && way.running < kMessagesAtOnce;
        if (is_open && start(step)) {
          ++way.running;
          moved = true;
        } else {
          way.closed_in = pass_;
        }
      } else {
        moved |= start(step);
      }
      if (step.kind == Kind::intra_node) intra_node_is_busy = true;
      if (step.kind != Kind::work || step.state == State::waits) continue;
      step.body();
      step.body = nullptr;
      step.state = State::done;
      return Progress::moved;  // as much as a chunk
    }
    if (step.state == State::runs) {
      const Progress progress = step.operation->advance();
      moved |= progress != Progress::blocked;
      if (progress == Progress::done) {
        if (step.kind == Kind::message) --way_of(step).running;
        step.operation.reset();
        step.state = State::done;
      } else if (step.kind == Kind::intra_node) {
        intra_node_is_busy = true;
      }
    }
    if (step.state == State::done && i == first_) ++first_;
  }
  return first_ == steps_.size() ? Progress::done : moved ? Progress::moved : Progress::blocked;
}

template <class Body>
void CollectiveSchedule::for_each_running(Body body) {
  for (std::size_t i = first_; i < std::min(steps_.size(), first_ + kWindow); ++i)
    if (steps_[i].operation) body(steps_[i]);
}

bool CollectiveSchedule::add_doorbells(std::vector<Doorbell>& bells) {
  bool all = true;
  std::vector<Doorbell> mine;
  for_each_running([&](Step& step) { all = step.operation->add_doorbells(mine) && all; });
  // All messages of a backend ring one bell.
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const auto same = [&](const Doorbell& bell) { return bell.word == mine[i].word && bell.seen == mine[i].seen; };
    if (std::none_of(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(i), same)) bells.push_back(mine[i]);
  }
  return all;
}

void CollectiveSchedule::check_peers() {
  bool asks_flat = false;
  for_each_running([&](Step& step) {
    asks_flat |= !step.is_intra_node;
    step.operation->check_peers();
  });
  // A neighbour may wait for a rank of another node, which nobody of this one would hear of.
  if (!asks_flat) backend_.flat().check_ranks();
}

bool CollectiveSchedule::retire() noexcept {
  bool all = true;
  for (Step& step : steps_)
    if (step.operation) all = step.operation->retire() && all;
  return all;
}

std::vector<int> CollectiveSchedule::missing_ranks() {
  std::vector<int> missing;
  for_each_running([&](Step& step) {
    for (const int rank : step.operation->missing_ranks())
      missing.push_back(step.is_intra_node ? backend_.local_members()[static_cast<std::size_t>(rank)] : rank);
  });
  std::ranges::sort(missing);
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  return missing;
}

}  // namespace phalanx
