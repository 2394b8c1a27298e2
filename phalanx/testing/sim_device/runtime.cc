#include "phalanx/testing/sim_device/runtime.h"

#include <fmt/format.h>

#include <array>
#include <exception>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/testing/sim_device/stream_queue.h"

namespace phalanx::sim_device {

struct Runtime::Stream {
  Stream(StreamId its_id, int its_index, std::function<void()> prepare_thread)
      : id(its_id), index(its_index), queue(std::move(prepare_thread)) {}

  StreamId id;
  int index;
  VectorClock clock;
  std::uint64_t host_version = 0;
  // Of the stream's thread:
  std::uint64_t seed = 0;
  std::minstd_rand random;
  StreamQueue queue;  // last: its thread uses the above
};

Runtime::Runtime(std::function<void()> prepare_thread) : prepare_thread_(std::move(prepare_thread)) {}
Runtime::~Runtime() = default;

Runtime::Stream& Runtime::stream(StreamId id) {
  std::unique_ptr<Stream>& found = streams_[id];
  if (!found) {
    found = std::make_unique<Stream>(id, static_cast<int>(streams_.size()) - 1, prepare_thread_);
    detector_.name_stream(fmt::format("sim:{} stream {}", id.device, id.stream));
  }
  if (found->host_version != host_version_) {  // what comes next starts after what the host has waited for
    found->clock.join(host_clock_);
    found->host_version = host_version_;
  }
  return *found;
}

void Runtime::launch(StreamId id, Kernel kernel) {
  std::vector<Access> pinned;
  for (const Access& access : kernel.accesses)
    if (pinned_.owns(access.begin)) pinned.push_back(access);
  const char* const name = kernel.name;
  EventPtr end;
  {
    const std::lock_guard lock(mutex_);
    Stream& on = stream(id);
    const Stamp stamp = on.clock.advance(on.index);
    // First what it reads: an operation does not race with itself.
    for (const Access& access : kernel.accesses)
      if (!access.is_write) detector_.access(access, stamp, on.clock, name);
    for (const Access& access : kernel.accesses)
      if (access.is_write) detector_.access(access, stamp, on.clock, name);
    if (kernel.counts_as_launch) {
      ++launches_[static_cast<std::size_t>(id.device)];
      ++launches_by_kernel_[id][name];
    }
    on.queue.put([this, &on, kernel = std::move(kernel)] { run(on, kernel); });
    if (!pinned.empty()) end = record_locked(on);
    for (const Access& access : pinned)
      pinned_.used(access.begin, {end->stamp_, access.is_write, name, [end] { return end->is_done(); }});
  }
}

void Runtime::run(Stream& on, const Kernel& kernel) {
  if (const auto longest = longest_delay_.load(); longest > 0) {
    if (const std::uint64_t seed = delay_seed_.load(); std::exchange(on.seed, seed) != seed)
      on.random.seed(static_cast<std::minstd_rand::result_type>(seed * 1000 + static_cast<std::uint64_t>(on.index)));
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::uniform_int_distribution<std::int64_t>(0, longest)(on.random)));
  }
  const auto device = static_cast<std::size_t>(on.id.device);
  if (has_failed_[device].load(std::memory_order_acquire)) return;
  try {
    kernel.body();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    const std::lock_guard lock(failure_mutex_);
    failures_[device] = fmt::format("sim:{}: '{}' failed on stream {}: {}", on.id.device, kernel.name, on.id.stream,
                                    text.substr(0, text.find('\n')));
    has_failed_[device].store(true, std::memory_order_release);
  }
}

EventPtr Runtime::record(StreamId id) {
  const std::lock_guard lock(mutex_);
  return record_locked(stream(id));
}

EventPtr Runtime::record_locked(Stream& on) {
  auto event = std::make_shared<Event>();
  event->device_ = on.id.device;
  event->stamp_ = {on.index, on.clock.of(on.index)};
  event->clock_ = on.clock;
  on.queue.put([this, event] {
    const std::lock_guard lock(event_mutex_);
    event->time_ = std::chrono::steady_clock::now();
    event->done_.store(true, std::memory_order_release);
    event_came_.notify_all();
  });
  return event;
}

void Runtime::wait(StreamId id, const EventPtr& event) {
  const std::lock_guard lock(mutex_);
  Stream& on = stream(id);
  on.clock.join(event->clock_);
  if (!event->is_done()) on.queue.put([this, event] { await(event); });
}

bool Runtime::query(StreamId id) {
  const std::lock_guard lock(mutex_);
  const Stream& on = stream(id);
  if (!on.queue.is_idle()) return false;
  host_joined(on.clock);
  return true;
}

void Runtime::await(const EventPtr& event) {
  std::unique_lock lock(event_mutex_);
  event_came_.wait(lock, [&] { return event->is_done(); });
}

bool Runtime::query(const EventPtr& event) {
  if (!event->is_done()) return false;
  joined(event);
  return true;
}

void Runtime::synchronize(const EventPtr& event, const std::string& cause) {
  host_waits_.add(cause);
  await(event);
  joined(event);
  throw_if_failed(event->device());
}

void Runtime::synchronize(StreamId id, const std::string& cause) { synchronize(record(id), cause); }

void Runtime::synchronize_device(int device, const std::string& cause) {
  std::vector<EventPtr> ends;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, one] : streams_)
      if (id.device == device) ends.push_back(record_locked(*one));
  }
  host_waits_.add(cause);
  for (const EventPtr& end : ends) {
    await(end);
    joined(end);
  }
  throw_if_failed(device);
}

void Runtime::joined(const EventPtr& event) {
  const std::lock_guard lock(mutex_);
  if (!event->host_knows_.exchange(true)) host_joined(event->clock_);
}

void Runtime::host_joined(const VectorClock& clock) {
  host_clock_.join(clock);
  ++host_version_;
  pinned_.host_joined(host_clock_);
}

void* Runtime::kernel_view(const void* address) const {
  if (memory_.owns(address)) return memory_.kernel_view(address);
  if (pinned_.owns(address)) return pinned_.kernel_view(address);
  return const_cast<void*>(address);
}

std::byte* Runtime::allocate_pinned(std::size_t bytes) {
  std::byte* const block = pinned_.allocate(bytes);
  forget_accesses(block, PinnedMemory::block_size(bytes));
  return block;
}

void Runtime::forget_accesses(const void* begin, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  detector_.forget(begin, bytes);
}

std::vector<std::string> Runtime::races() const {
  const std::lock_guard lock(mutex_);
  return detector_.reports();
}

void Runtime::clear_races() {
  const std::lock_guard lock(mutex_);
  detector_.clear_reports();
}

void Runtime::report_host_access(const PinnedMemory::Use& use, bool is_write) {
  const std::lock_guard lock(mutex_);
  detector_.report(fmt::format("the host {} pinned memory without waiting for '{}' on {}, which {} it",
                               is_write ? "writes" : "reads", use.operation, detector_.place(use.stamp),
                               use.is_write ? "writes" : "reads"));
}

std::map<std::string, std::uint64_t> Runtime::launches_by_kernel() const {
  const std::lock_guard lock(mutex_);
  std::map<std::string, std::uint64_t> by_name;
  for (const auto& [stream, kernels] : launches_by_kernel_) {
    for (const auto& [name, count] : kernels) by_name[name] += count;
  }
  return by_name;
}

std::map<std::string, std::uint64_t> Runtime::launches_by_kernel(StreamId stream) const {
  const std::lock_guard lock(mutex_);
  std::map<std::string, std::uint64_t> by_name;
  const auto found = launches_by_kernel_.find(stream);
  if (found == launches_by_kernel_.end()) return by_name;
  for (const auto& [name, count] : found->second) by_name[name] += count;
  return by_name;
}

void Runtime::clear_launches() {
  const std::lock_guard lock(mutex_);
  launches_by_kernel_.clear();
  for (auto& count : launches_) count = 0;
}

void Runtime::set_delays(Delays delays) {
  delay_seed_ = delays.seed;
  longest_delay_ = delays.longest.count();
}

std::string Runtime::failure(int device) const {
  const std::lock_guard lock(failure_mutex_);
  return failures_[static_cast<std::size_t>(device)];
}

void Runtime::clear_failure(int device) {
  const std::lock_guard lock(failure_mutex_);
  failures_[static_cast<std::size_t>(device)].clear();
  has_failed_[static_cast<std::size_t>(device)] = false;
}

void Runtime::throw_if_failed(int device) const {
  if (const std::string text = failure(device); !text.empty()) throw Error(text);
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

std::int64_t& current_stream(int device) {
  thread_local std::array<std::int64_t, kDevices> streams{};
  return streams.at(static_cast<std::size_t>(device));
}

}  // namespace phalanx::sim_device
