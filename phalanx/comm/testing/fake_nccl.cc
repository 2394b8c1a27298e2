#include "phalanx/comm/testing/fake_nccl.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <thread>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/comm/futex.h"
#include "phalanx/comm/testing/fake_streams.h"
#include "phalanx/comm/wait.h"

namespace phalanx {
namespace {

constexpr int kLooks = 3;             // polls until a call has succeeded
constexpr int kConnectTag = 1 << 20;  // of the sender's token; + 1: of the receiver's answer

DataType type_of(NcclType type) {
  switch (type) {
    case NcclType::float64:
      return DataType::f64;
    case NcclType::float16:
      return DataType::f16;
    case NcclType::bfloat16:
      return DataType::bf16;
    case NcclType::int32:
      return DataType::i32;
    case NcclType::int64:
      return DataType::i64;
    case NcclType::uint8:
      return DataType::u8;
    default:
      return DataType::f32;
  }
}

ReduceOp op_of(NcclOp op) {
  switch (op) {
    case NcclOp::product:
      return ReduceOp::product;
    case NcclOp::max:
      return ReduceOp::max;
    case NcclOp::min:
      return ReduceOp::min;
    case NcclOp::avg:
      return ReduceOp::avg;
    default:
      return ReduceOp::sum;
  }
}

}  // namespace

// One call inside a group; a single call is a group by itself.
struct FakeKernel {
  OperationDescription description;
  const void* copy_from = nullptr;  // the source of the first part of the output, if not in-place
  std::string name;
};

struct FakeGroup {
  int depth = 0;
  FakeNcclComm* comm = nullptr;
  DeviceStream stream = nullptr;
  std::vector<FakeKernel> kernels;
};

namespace {

thread_local FakeGroup fake_group;

// What the kernel touches. An all_gather in place leaves this rank's part alone.
std::vector<FakeNcclDevice::Range> ranges_of(const FakeKernel& kernel) {
  const OperationDescription& d = kernel.description;
  const auto bytes = [](std::int64_t count, DataType type) {
    return static_cast<std::size_t>(count) * element_size(type);
  };
  std::vector<FakeNcclDevice::Range> ranges;
  if (d.input != nullptr) ranges.push_back({d.input, bytes(d.input_count, d.dtype), false});
  if (kernel.copy_from != nullptr) ranges.push_back({kernel.copy_from, bytes(d.output_count, d.dtype), false});
  const auto* const output = static_cast<const std::byte*>(d.output);
  const auto* const own = static_cast<const std::byte*>(d.input);
  const auto* const end = output + bytes(d.output_count, d.dtype);
  if (d.verb == Verb::all_gather && own >= output && own < end) {
    const auto* const own_end = own + bytes(d.input_count, d.dtype);
    ranges.push_back({output, static_cast<std::size_t>(own - output), true});
    ranges.push_back({own_end, static_cast<std::size_t>(end - own_end), true});
  } else if (d.output != nullptr) {
    ranges.push_back({d.output, bytes(d.output_count, d.dtype), true});
  }
  for (const Transfer& one : d.transfers) ranges.push_back({one.data, bytes(one.count, one.dtype), !one.is_send});
  return ranges;
}

void use_kernel_views(FakeKernel& kernel, const FakeNcclDevice& device) {
  OperationDescription& d = kernel.description;
  d.input = device.kernel_view(d.input);
  d.output = device.kernel_view(d.output);
  kernel.copy_from = device.kernel_view(kernel.copy_from);
  for (Transfer& one : d.transfers) one.data = static_cast<std::byte*>(device.kernel_view(one.data));
}

}  // namespace

void FakeNcclDevice::launch(DeviceStream stream, const char* /*name*/, const std::vector<Range>& /*ranges*/,
                            std::function<void()> kernel) {
  FakeStreams::enqueue(stream, std::move(kernel));
}

struct FakeNcclComm {
  FakeNccl* library = nullptr;
  std::shared_ptr<Backend> transport;
  std::atomic<int> looks{0};  // remaining polls until the last call succeeds; -1: never
  std::atomic<bool> aborted{false};
  std::atomic<int> kernels{0};  // in the stream
  std::uint64_t sequence = 0;   // used by kernels only: one stream at a time
  std::thread splitter;
  std::thread connector;
  bool are_all_connected = false;            // for collectives
  std::set<std::pair<int, bool>> connected;  // for messages: to (true) or from a rank

  static FakeNcclComm* of(NcclComm* comm) { return reinterpret_cast<FakeNcclComm*>(comm); }
  NcclComm* handle() { return reinterpret_cast<NcclComm*>(this); }

  // The connections that a group's kernels still need: a barrier of all ranks, or a token and an answer for each
  // direction in which messages go to or from a peer for the first time.
  std::vector<OperationDescription> connections_for(const std::vector<FakeKernel>& group) {
    std::vector<OperationDescription> needed;
    OperationDescription tokens;
    tokens.verb = Verb::batch_isend_irecv;
    for (const FakeKernel& kernel : group) {
      if (kernel.description.transfers.empty() && !std::exchange(are_all_connected, true)) needed.emplace_back();
      for (const Transfer& transfer : kernel.description.transfers) {
        if (!connected.insert({transfer.peer, transfer.is_send}).second) continue;
        const int sent = transfer.is_send ? kConnectTag : kConnectTag + 1;
        const int received = transfer.is_send ? kConnectTag + 1 : kConnectTag;
        tokens.transfers.push_back({true, &token_out, 1, DataType::u8, transfer.peer, sent});
        tokens.transfers.push_back({false, &token_in, 1, DataType::u8, transfer.peer, received});
      }
    }
    if (!tokens.transfers.empty()) needed.push_back(std::move(tokens));
    return needed;
  }
  std::uint8_t token_out = 0, token_in = 0;

  void drive(OperationDescription description) {
    // Ranks exchange different numbers of messages, but make the same collective calls.
    description.sequence = description.transfers.empty() ? sequence++ : 0;
    std::unique_ptr<Operation> operation;
    try {
      operation = transport->start(description);
      SpinBackoff backoff(SpinBackoff::kOversubscribed);
      while (!aborted.load()) {
        const Progress progress = operation->advance();
        if (progress == Progress::done) return;
        if (progress == Progress::moved || backoff.step()) continue;
        const std::optional<Doorbell> bell = operation->doorbell();
        doorbell_wait(bell ? std::span<const Doorbell>(&*bell, 1) : std::span<const Doorbell>(),
                      std::chrono::milliseconds(5));
      }
    } catch (const Error&) {
      // The calls differ, or a rank has aborted: NCCL would wait forever.
    }
    transport->abort("hangs");
    while (!aborted.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    while (operation && !operation->retire()) std::this_thread::yield();
  }

  void run(std::vector<FakeKernel>& group) {
    OperationDescription messages;
    messages.verb = Verb::batch_isend_irecv;
    for (FakeKernel& kernel : group) {
      OperationDescription& d = kernel.description;
      if (aborted.load()) break;
      if (kernel.copy_from != nullptr && d.output_count > 0)
        std::memmove(d.output, kernel.copy_from, static_cast<std::size_t>(d.output_count) * element_size(d.dtype));
      if (d.transfers.empty())
        drive(d);
      else
        messages.transfers.insert(messages.transfers.end(), d.transfers.begin(), d.transfers.end());
    }
    if (!messages.transfers.empty() && !aborted.load()) drive(messages);
    kernels.fetch_sub(1);
  }
};

FakeNccl::FakeNccl(std::shared_ptr<Backend> transport, std::shared_ptr<FakeNcclDevice> device)
    : transport_(std::move(transport)), device_(std::move(device)) {}

FakeNccl::~FakeNccl() {
  for (const auto& comm : comms_) {
    if (comm->splitter.joinable()) comm->splitter.join();
    if (comm->connector.joinable()) comm->connector.join();
  }
}

void FakeNccl::note(std::string call) {
  const std::lock_guard lock(mutex_);
  calls_.push_back(std::move(call));
}

std::vector<std::string> FakeNccl::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

FakeNcclComm* FakeNccl::add(std::shared_ptr<Backend> transport) {
  const std::lock_guard lock(mutex_);
  comms_.push_back(std::make_unique<FakeNcclComm>());
  comms_.back()->library = this;
  comms_.back()->transport = std::move(transport);
  comms_.back()->looks = kLooks;
  return comms_.back().get();
}

bool FakeNccl::may_call(FakeNcclComm* comm) {
  if (comm->looks.load() == 0 && !comm->aborted.load()) return true;
  ++misuses_;
  return false;
}

NcclResult FakeNccl::submit(FakeNcclComm* comm, DeviceStream stream, OperationDescription description,
                            const void* copy_from, std::string name) {
  if (!may_call(comm)) return NcclResult::invalid_usage;
  const bool alone = fake_group.depth == 0;
  if (alone && !description.transfers.empty()) {
    ++misuses_;
    return NcclResult::invalid_usage;
  }
  if (alone) fake_group = {};
  fake_group.comm = comm;
  fake_group.stream = stream;
  fake_group.kernels.push_back({std::move(description), copy_from, std::move(name)});
  return alone ? end_group() : NcclResult::success;
}

NcclResult FakeNccl::end_group() {
  FakeGroup group = std::move(fake_group);
  fake_group = {};
  if (group.kernels.empty()) return NcclResult::success;
  std::string text;
  for (const FakeKernel& kernel : group.kernels) text += (text.empty() ? "" : ", ") + kernel.name;
  note(group.depth > 0 ? fmt::format("group({})", text) : text);
  FakeNcclComm* comm = group.comm;
  std::vector<OperationDescription> needed;
  if (!takes_at_once_) needed = comm->connections_for(group.kernels);
  if (needed.empty()) {
    put(comm, group);
    return NcclResult::in_progress;
  }
  comm->looks = -1;
  if (comm->connector.joinable()) comm->connector.join();
  comm->connector = std::thread([this, comm, needed = std::move(needed), group = std::move(group)]() mutable {
    // Earlier kernels use the same transport.
    while (comm->kernels.load() != 0 && !comm->aborted.load()) std::this_thread::yield();
    for (OperationDescription& one : needed)
      if (!comm->aborted.load()) comm->drive(std::move(one));
    if (!comm->aborted.load()) put(comm, group);
  });
  return NcclResult::in_progress;
}

void FakeNccl::put(FakeNcclComm* comm, FakeGroup& group) const {
  comm->kernels.fetch_add(1);
  std::vector<FakeNcclDevice::Range> ranges;
  for (FakeKernel& kernel : group.kernels) {
    std::ranges::copy(ranges_of(kernel), std::back_inserter(ranges));
    use_kernel_views(kernel, *device_);
  }
  const std::string name = group.kernels.front().name;
  device_->launch(
      group.stream, name.c_str(), ranges,
      [comm, kernels = std::make_shared<std::vector<FakeKernel>>(std::move(group.kernels))] { comm->run(*kernels); });
  comm->looks = takes_at_once_ ? 0 : kLooks;
}

NcclResult FakeNccl::state_of(FakeNcclComm* comm, NcclResult* state) {
  if (const int failure = failure_.load()) {
    *state = static_cast<NcclResult>(failure);
    return NcclResult::success;
  }
  if (int looks = comm->looks.load(); looks > 0) comm->looks.compare_exchange_strong(looks, looks - 1);
  *state = comm->looks.load() == 0 ? NcclResult::success : NcclResult::in_progress;
  return NcclResult::success;
}

NcclResult FakeNccl::split(FakeNcclComm* comm, int color, int key, NcclComm** result) {
  if (!may_call(comm)) return NcclResult::invalid_usage;
  if (comm->kernels.load() != 0) ++misuses_;
  note("split");
  comm->looks = -1;
  FakeNcclComm* child = color < 0 ? nullptr : add(nullptr);
  if (child) child->looks = -1;
  *result = nullptr;
  if (comm->splitter.joinable()) comm->splitter.join();
  comm->splitter = std::thread([this, comm, child, color, key, result] {
    try {
      Communicator bootstrap(comm->transport, {});
      SplitRequest request;
      std::vector<std::pair<int, int>> members;
      int rank = 0;
      for (const std::string& text : bootstrap.all_gather_bytes(fmt::format("{} {}", color, key))) {
        const int its_color = std::stoi(text);
        if (color >= 0 && its_color == color) members.emplace_back(std::stoi(text.substr(text.find(' '))), rank);
        ++rank;
      }
      std::sort(members.begin(), members.end());
      for (const auto& [its_key, its_rank] : members) {
        if (its_rank == bootstrap.rank()) request.rank = static_cast<int>(request.members.size());
        request.members.push_back(its_rank);
      }
      request.name = "fake";
      request.serial = comm->sequence++;
      request.exchange = [&](const std::string& value) { return bootstrap.all_gather_bytes(value); };
      auto transport = comm->transport->split(request);
      comm->looks = kLooks;
      if (child) {
        // As NCCL does: the old communicator can be ready before the new one is there.
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        child->transport = std::move(transport);
        child->looks = kLooks;
        std::atomic_ref(*result).store(child->handle(), std::memory_order_release);
      }
    } catch (const std::exception&) {
      *result = nullptr;
      note("split given up");
    }
  });
  return NcclResult::in_progress;
}

NcclResult FakeNccl::abort(FakeNcclComm* comm) {
  note("abort");
  comm->aborted = true;
  if (comm->transport) comm->transport->abort("aborted");
  if (comm->connector.joinable()) comm->connector.join();
  if (comm->splitter.joinable()) comm->splitter.join();
  while (comm->kernels.load() != 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  return NcclResult::success;
}

std::shared_ptr<const NcclTable> FakeNccl::table() {
  auto table = std::make_shared<NcclTable>();
  const auto of = [](NcclComm* comm) { return FakeNcclComm::of(comm); };
  table->get_version = [](int* version) {
    *version = 21800;
    return NcclResult::success;
  };
  table->get_error_string = [](NcclResult result) {
    return result == NcclResult::remote_error ? "remote process exited or there was a network error" : "fake error";
  };
  table->get_last_error = [](NcclComm*) { return "socket closed"; };
  table->get_unique_id = [](NcclUniqueId* id) {
    for (std::size_t i = 0; i < sizeof id->bytes; ++i) id->bytes[i] = static_cast<char>(i * 7);
    return NcclResult::success;
  };
  table->comm_init_rank_config = [this](NcclComm** comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config) {
    const bool id_is_right = id.bytes[0] == 0 && id.bytes[127] == static_cast<char>(127 * 7);
    if (!id_is_right || config->blocking != 0 || ranks != transport_->size() || rank != transport_->rank())
      return NcclResult::invalid_argument;
    FakeNcclComm* made = add(transport_);
    if (!connects_) made->looks = -1;
    note("init");
    *comm = made->handle();
    return NcclResult::in_progress;
  };
  table->comm_split = [this, of](NcclComm* comm, int color, int key, NcclComm** result, NcclConfig*) {
    return split(of(comm), color, key, result);
  };
  table->comm_finalize = [this](NcclComm*) {
    note("finalize");
    return NcclResult::success;
  };
  table->comm_destroy = [this](NcclComm*) {
    note("destroy");
    return NcclResult::success;
  };
  table->comm_abort = [this, of](NcclComm* comm) { return abort(of(comm)); };
  table->comm_get_async_error = [this, of](NcclComm* comm, NcclResult* state) { return state_of(of(comm), state); };
  table->group_start = [] {
    if (fake_group.depth == 0) fake_group = {};
    ++fake_group.depth;
    return NcclResult::success;
  };
  table->group_end = [this] { return end_group(); };

  table->all_reduce = [this, of](const void* in, void* out, std::size_t count, NcclType type, NcclOp op, NcclComm* comm,
                                 DeviceStream stream) {
    OperationDescription d;
    d.verb = Verb::all_reduce;
    d.dtype = type_of(type);
    d.op = op_of(op);
    d.output = out;
    d.output_count = static_cast<std::int64_t>(count);
    return submit(of(comm), stream, std::move(d), in == out ? nullptr : in, "all_reduce");
  };
  table->broadcast = [this, of](const void* in, void* out, std::size_t count, NcclType type, int root, NcclComm* comm,
                                DeviceStream stream) {
    OperationDescription d;
    d.verb = Verb::broadcast;
    d.dtype = type_of(type);
    d.root = root;
    d.output = out;
    d.output_count = static_cast<std::int64_t>(count);
    const bool is_root = of(comm)->transport->rank() == root;
    return submit(of(comm), stream, std::move(d), is_root && in != out ? in : nullptr, "broadcast");
  };
  table->reduce = [this, of](const void* in, void* out, std::size_t count, NcclType type, NcclOp op, int root,
                             NcclComm* comm, DeviceStream stream) {
    OperationDescription d;
    d.verb = Verb::reduce;
    d.dtype = type_of(type);
    d.op = op_of(op);
    d.root = root;
    const bool is_root = of(comm)->transport->rank() == root;
    d.output = is_root ? out : const_cast<void*>(in);
    d.output_count = static_cast<std::int64_t>(count);
    return submit(of(comm), stream, std::move(d), is_root && in != out ? in : nullptr, "reduce");
  };
  table->all_gather = [this, of](const void* in, void* out, std::size_t count, NcclType type, NcclComm* comm,
                                 DeviceStream stream) {
    OperationDescription d;
    d.verb = Verb::all_gather;
    d.dtype = type_of(type);
    d.input = in;
    d.input_count = static_cast<std::int64_t>(count);
    d.output = out;
    d.output_count = d.input_count * of(comm)->transport->size();
    return submit(of(comm), stream, std::move(d), nullptr, "all_gather");
  };
  table->reduce_scatter = [this, of](const void* in, void* out, std::size_t count, NcclType type, NcclOp op,
                                     NcclComm* comm, DeviceStream stream) {
    OperationDescription d;
    d.verb = Verb::reduce_scatter;
    d.dtype = type_of(type);
    d.op = op_of(op);
    d.input = in;
    d.input_count = static_cast<std::int64_t>(count) * of(comm)->transport->size();
    d.output = out;
    d.output_count = static_cast<std::int64_t>(count);
    return submit(of(comm), stream, std::move(d), nullptr, "reduce_scatter");
  };
  table->send = [this, of](const void* data, std::size_t count, NcclType type, int peer, NcclComm* comm,
                           DeviceStream stream) {
    OperationDescription d;
    d.transfers.push_back({true, const_cast<void*>(data), static_cast<std::int64_t>(count), type_of(type), peer, 0});
    return submit(of(comm), stream, std::move(d), nullptr, fmt::format("send {}", peer));
  };
  table->recv = [this, of](void* data, std::size_t count, NcclType type, int peer, NcclComm* comm,
                           DeviceStream stream) {
    OperationDescription d;
    d.transfers.push_back({false, data, static_cast<std::int64_t>(count), type_of(type), peer, 0});
    return submit(of(comm), stream, std::move(d), nullptr, fmt::format("recv {}", peer));
  };
  return table;
}

}  // namespace phalanx
