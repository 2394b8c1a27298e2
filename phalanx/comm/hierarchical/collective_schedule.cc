#include "phalanx/comm/hierarchical/collective_schedule.h"

#include <algorithm>
#include <cstring>

namespace phalanx {
namespace {

// By the verb, not by which pointers are null: the data of an empty tensor are null, too.
std::size_t bytes_given(const OperationDescription& d, int rank) {
  if (d.compare_only) return 0;
  std::size_t bytes = 0;
  for (const Transfer& one : d.transfers)
    if (one.is_send) bytes += static_cast<std::size_t>(one.count) * element_size(one.dtype);
  if (!d.transfers.empty() || (d.verb == Verb::broadcast && d.root != rank)) return bytes;
  const bool is_in_place = d.verb == Verb::broadcast || d.verb == Verb::all_reduce || d.verb == Verb::reduce;
  return static_cast<std::size_t>(is_in_place ? d.output_count : d.input_count) * element_size(d.dtype);
}

}  // namespace

CollectiveSchedule::CollectiveSchedule(HierarchicalBackend& backend, bool on_device)
    : backend_(backend), on_device_(on_device) {}

CollectiveSchedule::~CollectiveSchedule() {
  steps_.clear();  // operations before the memory that they use
  for (auto& [bytes, memory] : memory_) backend_.release_buffer(std::move(memory), bytes);
}

std::byte* CollectiveSchedule::memory(std::size_t bytes) {
  memory_.emplace_back(bytes, backend_.acquire_buffer(bytes));
  return memory_.back().second.get();
}

CollectiveSchedule::Id CollectiveSchedule::add(Step step, After after) {
  std::erase_if(after, [&](Id id) { return id == kNone || steps_[static_cast<std::size_t>(id)].state == State::done; });
  step.after = std::move(after);
  steps_.push_back(std::move(step));
  return static_cast<Id>(steps_.size()) - 1;
}

CollectiveSchedule::Id CollectiveSchedule::intra_node(OperationDescription description, After after) {
  description.on_device = on_device_ && description.verb != Verb::barrier;
  description.sequence = backend_.next_intra_node_sequence();
  const Id id = operation(*backend_.intra_node(), std::move(description), std::move(after));
  steps_.back().kind = Kind::collective;
  return id;
}

CollectiveSchedule::Id CollectiveSchedule::operation(Backend& transport, OperationDescription description,
                                                     After after) {
  Step step;
  step.kind = Kind::operation;
  step.transport = &transport;
  step.sent = bytes_given(description, transport.rank());
  step.description = std::move(description);
  return add(std::move(step), std::move(after));
}

CollectiveSchedule::Id CollectiveSchedule::send(const void* data, std::size_t bytes, int peer, After after,
                                                Memory memory) {
  return message(true, const_cast<void*>(data), bytes, peer, std::move(after), memory);
}
CollectiveSchedule::Id CollectiveSchedule::receive(void* data, std::size_t bytes, int peer, After after,
                                                   Memory memory) {
  return message(false, data, bytes, peer, std::move(after), memory);
}

CollectiveSchedule::Id CollectiveSchedule::message(bool is_send, void* data, std::size_t bytes, int peer, After after,
                                                   Memory memory) {
  const bool is_local = backend_.is_local(peer);
  Step step;
  step.kind = Kind::message;
  step.description.on_device = on_device_ && memory == Memory::caller;
  step.transport = is_local                     ? backend_.intra_node()
                   : step.description.on_device ? &backend_.staged_flat()
                                                : &backend_.flat();
  step.sent = is_send ? bytes : 0;
  step.description.verb = is_send ? Verb::send : Verb::recv;
  step.description.transfers.push_back({is_send, data, static_cast<std::int64_t>(bytes), DataType::u8,
                                        is_local ? backend_.layout().local_rank_of(peer) : peer, kHierarchicalTag});
  return add(std::move(step), std::move(after));
}

CollectiveSchedule::Id CollectiveSchedule::copy(void* to, const void* from, std::size_t bytes, After after) {
  if (to == from || bytes == 0) return all(std::move(after));
  if (!on_device_) return work([=] { std::memcpy(to, from, bytes); }, std::move(after));
  Step step;
  step.kind = Kind::copy;
  step.body = [this, to, from, bytes] { backend_.streams().copy(backend_.stream(), to, from, bytes); };
  return add(std::move(step), std::move(after));
}

CollectiveSchedule::Id CollectiveSchedule::work(std::function<void()> body, After after) {
  Step step;
  step.body = std::move(body);
  return add(std::move(step), std::move(after));
}

CollectiveSchedule::Id CollectiveSchedule::all(After after) {
  std::erase(after, kNone);
  if (after.empty()) return kNone;
  return after.size() == 1 ? after.front() : work([] {}, std::move(after));
}

CollectiveSchedule::Way& CollectiveSchedule::way_of(const Step& step) {
  if (ways_.empty()) ways_.resize(2 * static_cast<std::size_t>(backend_.size()));
  const Transfer& transfer = step.description.transfers.front();
  const int peer =
      is_intra_node(step) ? backend_.local_members()[static_cast<std::size_t>(transfer.peer)] : transfer.peer;
  return ways_[2 * static_cast<std::size_t>(peer) + (transfer.is_send ? 1 : 0)];
}

bool CollectiveSchedule::may_start(const Step& step) const {
  return std::ranges::all_of(step.after,
                             [&](Id id) { return steps_[static_cast<std::size_t>(id)].state == State::done; });
}

// True if it has begun.
bool CollectiveSchedule::start(Step& step) {
  if (!may_start(step)) return false;
  step.state = State::runs;
  if (step.transport == nullptr) {
    step.body();
    step.body = nullptr;
    if (step.kind == Kind::copy) step.copied = backend_.streams().record(backend_.stream());
    return true;
  }
  backend_.count(is_intra_node(step), step.sent);
  const auto current = on_device_ ? backend_.streams().enter_stream(backend_.stream()) : nullptr;
  step.operation = step.transport->start(step.description);
  if (on_device_) step.operation->completion();  // advance() launches it
  return true;
}

bool CollectiveSchedule::start_message(Step& step) {
  Way& way = way_of(step);
  if (way.closed_in == pass_ || way.running == kMessagesAtOnce || !start(step)) {
    way.closed_in = pass_;
    return false;
  }
  ++way.running;
  return true;
}

Progress CollectiveSchedule::poll(Step& step) {
  const Progress progress = step.operation           ? step.operation->advance()
                            : step.copied->is_done() ? Progress::done
                                                     : Progress::blocked;
  if (progress != Progress::done) return progress;
  if (step.kind == Kind::message) --way_of(step).running;
  step.operation.reset();
  step.copied.reset();
  step.state = State::done;
  return Progress::done;
}

Progress CollectiveSchedule::advance() {
  ++pass_;
  bool moved = false, intra_node_is_busy = false;
  const std::size_t end = window_end();
  for (std::size_t i = first_; i < end; ++i) {
    Step& step = steps_[i];
    const bool is_collective = step.kind == Kind::collective;
    if (step.state == State::waits && !(is_collective && intra_node_is_busy)) {
      const bool has_begun = step.kind == Kind::message ? start_message(step) : start(step);
      moved |= has_begun;
      if (has_begun && step.kind == Kind::work) {
        step.state = State::done;
        return Progress::moved;  // that was as much as a chunk
      }
    }
    if (step.state == State::runs) moved |= poll(step) != Progress::blocked;
    if (is_collective && step.state != State::done) intra_node_is_busy = true;
    if (step.state == State::done && i == first_) ++first_;
  }
  return first_ == steps_.size() ? Progress::done : moved ? Progress::moved : Progress::blocked;
}

template <class Body>
void CollectiveSchedule::for_each_running(Body body) {
  for (std::size_t i = first_; i < window_end(); ++i)
    if (steps_[i].operation) body(steps_[i]);
}

bool CollectiveSchedule::add_doorbells(std::vector<Doorbell>& bells) {
  bool all = true;
  for (std::size_t i = first_; i < window_end(); ++i)
    if (steps_[i].copied) all = false;  // a device rings no bell
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
    asks_flat |= !is_intra_node(step);
    step.operation->check_peers();
  });
  // A rank of this node may wait for a rank of another node. Nobody on this node would hear of that rank's end.
  if (!asks_flat) backend_.flat().check_ranks();
}

bool CollectiveSchedule::retire() noexcept {
  bool all = true;
  for (Step& step : steps_) {
    if (step.operation) all = step.operation->retire() && all;
    try {
      all = all && (!step.copied || step.copied->is_done());
    } catch (const std::exception&) {
      // The device has failed: it copies nothing any more.
    }
  }
  return all;
}

std::vector<int> CollectiveSchedule::missing_ranks() {
  std::vector<int> missing;
  for_each_running([&](Step& step) {
    for (const int rank : step.operation->missing_ranks())
      missing.push_back(is_intra_node(step) ? backend_.local_members()[static_cast<std::size_t>(rank)] : rank);
  });
  std::ranges::sort(missing);
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  return missing;
}

}  // namespace phalanx
