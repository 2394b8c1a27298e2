#include "phalanx/comm/communicator.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <numeric>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/owner_process.h"
#include "phalanx/comm/backend.h"
#include "phalanx/comm/byte_objects.h"
#include "phalanx/comm/data_type.h"
#include "phalanx/comm/flight_log.h"
#include "phalanx/comm/progress.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/signature.h"

namespace phalanx {
namespace {

DataType data_type_for(const at::Tensor& tensor, const char* what) {
  if (const auto type = find_data_type(tensor.scalar_type())) return *type;
  throw Error(
      fmt::format("{}: element type {} cannot be communicated; expected float32, float64, float16, bfloat16, "
                  "int32, int64, uint8 or bool",
                  what, c10::toString(tensor.scalar_type())));
}

/// Memory that another stream has allocated is not used again there before this stream has done what it has queued when
/// the tensor is freed. For memory of this stream it does nothing.
void record_current_stream(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    const c10::impl::VirtualGuardImpl impl(tensor.device().type());
    impl.recordDataPtrOnStream(tensor.storage().data_ptr(), impl.getStream(tensor.device()));
  }
}

/// Whether the memory, if there is any, is that of a device's caching allocator. Memory with another deleter may be
/// gone at once.
bool is_in_stream_order(const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  if (tensor.device().is_cpu()) return false;
  const c10::Allocator* const allocator = c10::GetAllocator(tensor.device().type());
  const c10::DeleterFnPtr caching = allocator != nullptr ? allocator->raw_deleter() : nullptr;
  return caching != nullptr && tensor.storage().data_ptr().get_deleter() == caching;
}

}  // namespace

class Communicator::Impl {
 public:
  struct Family;
  Impl(std::shared_ptr<Backend> backend, CommunicatorOptions options)
      : Impl(std::move(backend), std::move(options), nullptr, "", {}) {
    members_.resize(static_cast<std::size_t>(size()));
    std::iota(members_.begin(), members_.end(), 0);
    id_ = options_.name;
    join(std::make_shared<Family>(
        rank(), size(),
        FlightOptions{options_.trace_files, options_.trace_folder, options_.trace_prefix, options_.trace_capacity}));
  }
  /// A member of a family; `members` are ranks of its first communicator.
  Impl(std::shared_ptr<Backend> backend, CommunicatorOptions options, std::shared_ptr<Family> family, std::string id,
       std::vector<int> members)
      : backend_(std::move(backend)),
        options_(std::move(options)),
        name_(std::make_shared<const std::string>(options_.name)),
        traits_(backend_->traits()),
        id_(std::move(id)),
        members_(std::move(members)) {
    if (family) join(std::move(family));
  }

  // What a communicator shares with all communicators split from it.
  struct Family {
    Family(int rank, int size, FlightOptions files) : logs(FlightLogs::make(rank, size, std::move(files))) {}
    std::atomic<bool> is_started{false};
    std::shared_ptr<FlightLogs> logs;
    std::mutex mutex;
    std::vector<std::weak_ptr<OperationQueue>> queues;
  };

  void join(std::shared_ptr<Family> family) {
    family_ = std::move(family);
    flight_ = std::make_shared<FlightLog>(family_->logs, FlightGroup{*name_, id_, rank(), members_});
    family_->logs->add(flight_);
    const std::lock_guard lock(family_->mutex);
    std::erase_if(family_->queues, [](const auto& queue) { return queue.expired(); });
    family_->queues.push_back(queue_);
  }

  ~Impl() {
    if (queue_->is_empty()) return;
    // On streams that is legal: the host need not have waited.
    if (!traits_.stream_ordered || std::uncaught_exceptions() > 0)
      // Contract broken, or unwinding after an error: operations in flight must not outlive the communicator silently.
      backend_->abort(fmt::format("rank {} destroyed communicator '{}' with operations under way", rank(), *name_));
    while (!queue_->is_empty()) std::this_thread::yield();
  }

  int rank() const { return backend_->rank(); }
  int size() const { return backend_->size(); }

  // --- checks -------------------------------------------------------------------------------------------------------

  // Whether it is on the kind of device that this libtorch computes on.
  static bool is_on_accelerator(const at::Tensor& tensor) {
    return !tensor.device().is_cpu() && tensor.device().type() == at::accelerator::getAccelerator();
  }
  // This group's device.
  c10::Device device_beside(const at::Tensor& tensor) const {
    return {tensor.device().type(), static_cast<c10::DeviceIndex>(traits_.cuda_device)};
  }

  DataType check(const at::Tensor& tensor, const char* what) const {
    if (!tensor.defined()) throw Error(fmt::format("{}: the tensor is undefined", what));
    if (traits_.cuda_device >= 0 && is_on_accelerator(tensor) && tensor.device().index() != traits_.cuda_device)
      throw Error(fmt::format("{}: group '{}' is on {} and the tensor on {}", what, *name_, device_beside(tensor).str(),
                              tensor.device().str()));
    if (!tensor.device().is_cpu() && (traits_.host_only || !is_on_accelerator(tensor)))
      throw Error(fmt::format("{}: the {} backend of group '{}' moves CPU tensors; this one is on {}", what,
                              traits_.name, *name_, tensor.device().str()));
    if (!tensor.is_contiguous())
      throw Error(fmt::format("{}: the tensor of shape {} and strides {} is not contiguous: copy it first", what,
                              fmt::join(tensor.sizes(), "x"), fmt::join(tensor.strides(), ",")));
    return data_type_for(tensor, what);
  }

  void require_own_process(Verb verb) const {
    if (!owner_.is_this_process())
      throw Error(
          fmt::format("{}: communicator '{}' belongs to the process that forked this one; expected: one that "
                      "this process has made",
                      name_of(verb), *name_));
  }

  void set_root(OperationDescription& d, int root, const char* what) const {
    check_root(root, what);
    d.root = root;
  }

  void check_root(int root, const char* what) const {
    if (root < 0 || root >= size())
      throw Error(fmt::format("{}: root {} is not a rank of group '{}' (0 to {})", what, root, *name_, size() - 1));
  }

  void check_peer(int peer, const char* what) const {
    if (peer < 0 || peer >= size())
      throw Error(fmt::format("{}: rank {} is not in group '{}' (0 to {})", what, peer, *name_, size() - 1));
  }

  static void read_from(OperationDescription& d, const at::Tensor& input) {
    d.input = input.const_data_ptr();
    d.input_count = input.numel();
  }

  static void write_to(OperationDescription& d, const at::Tensor& output) {
    d.output = output.mutable_data_ptr();
    d.output_count = output.numel();
  }

  static void set_op(OperationDescription& d, ReduceOp op, const char* what) {
    if (!reducible(d.dtype, op))
      throw Error(fmt::format("{}: avg is for floating point; these are {} (use sum)", what, name_of(d.dtype)));
    d.op = op;
  }

  static void check_same_type(DataType a, DataType b, const char* what) {
    if (a != b) throw Error(fmt::format("{}: output is {} and input is {}", what, name_of(a), name_of(b)));
  }

  static void check_count(std::int64_t found, std::int64_t expected, const char* which, const char* what) {
    if (found != expected)
      throw Error(fmt::format("{}: {} has {} elements, expected {}", what, which, found, expected));
  }

  std::int64_t check_counts(const std::vector<std::int64_t>& counts, const char* what) const {
    if (static_cast<int>(counts.size()) != size())
      throw Error(fmt::format("{}: {} counts for {} ranks", what, counts.size(), size()));
    std::int64_t total = 0;
    for (std::int64_t count : counts) {
      if (count < 0) throw Error(fmt::format("{}: a count is {}", what, count));
      total += count;
    }
    return total;
  }

  // `part` may be exactly this rank's slice of `whole`, or not overlap with it.
  static void check_overlap(const at::Tensor& whole, const at::Tensor& part, std::int64_t slice_begin,
                            const char* what) {
    if (whole.numel() == 0 || part.numel() == 0) return;
    const auto* whole_begin = static_cast<const std::byte*>(whole.const_data_ptr());
    const auto* whole_end = whole_begin + whole.nbytes();
    const auto* begin = static_cast<const std::byte*>(part.const_data_ptr());
    const auto* end = begin + part.nbytes();
    if (end <= whole_begin || begin >= whole_end) return;
    if (slice_begin >= 0 && begin == whole_begin + static_cast<std::size_t>(slice_begin) * whole.element_size()) return;
    throw Error(fmt::format("{}: input and output overlap other than as this rank's slice", what));
  }

  // A verb on `tensor`.
  OperationDescription describe(Verb verb, const at::Tensor& tensor, const char* what) const {
    OperationDescription d;
    d.verb = verb;
    d.dtype = check(tensor, what);
    return d;
  }

  // A verb from `input` to `output`.
  OperationDescription describe(Verb verb, const at::Tensor& output, const at::Tensor& input, const char* what) const {
    OperationDescription d = describe(verb, input, what);
    check_same_type(check(output, what), d.dtype, what);
    read_from(d, input);
    write_to(d, output);
    return d;
  }

  // all_gather, reduce_scatter, and the root's gather and scatter: `whole` holds the parts of all ranks, `part` this
  // rank's. Equal parts have no counts.
  void check_parts(const at::Tensor& whole, const at::Tensor& part, const std::vector<std::int64_t>& counts,
                   bool is_uneven, bool is_whole_output, const char* what) const {
    const char *const name_of_whole = is_whole_output ? "output" : "input", *const name_of_part =
                                                                                is_whole_output ? "input" : "output";
    std::int64_t begin = part.numel() * rank();
    if (is_uneven) {
      check_count(whole.numel(), check_counts(counts, what), name_of_whole, what);
      check_count(part.numel(), counts[static_cast<std::size_t>(rank())], name_of_part, what);
      begin = std::accumulate(counts.begin(), counts.begin() + rank(), std::int64_t{0});
    } else {
      check_count(whole.numel(), part.numel() * size(), name_of_whole, what);
    }
    check_overlap(whole, part, begin, what);
  }

  // --- issue --------------------------------------------------------------------------------------------------------

  // Whether the tensors are on the device of a stream-ordered backend. Without a CUDA device (tests) all tensors count
  // as being there, except those of messages in host memory.
  bool is_on_device(const std::vector<at::Tensor>& tensors, Verb verb, const std::vector<Transfer>& transfers) const {
    if (!traits_.stream_ordered) return false;
    if (traits_.cuda_device < 0 && !transfers.empty() && transfers.front().tag >= kHostMemoryTag) return false;
    bool on_host = false;
    const at::Tensor* on_device = nullptr;
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined()) continue;
      if (traits_.cuda_device < 0 || !tensor.device().is_cpu()) {
        on_device = &tensor;
      } else {
        on_host = true;
      }
    }
    if (on_host && on_device != nullptr)
      throw Error(fmt::format("{}: some of the tensors are on the CPU and some on {}; expected one device",
                              name_of(verb), on_device->device().str()));
    return on_device != nullptr;
  }

  Work issue(OperationDescription description, bool async, std::vector<at::Tensor> tensors = {}) {
    require_own_process(description.verb);
    WorkState::Issued issued;
    const bool launches_now = description.on_device = is_on_device(tensors, description.verb, description.transfers);
    const bool is_p2p = !description.transfers.empty();
    description.sequence = is_p2p ? p2p_sequence_++ : sequence_++;
    issued.flight = flight_;
    issued.flight_number = flight_->issued(description);
    issued.description = std::move(description);
    issued.backend = backend_;
    issued.group = name_;
    issued.timeout = family_->is_started.load(std::memory_order_relaxed) ? options_.timeout : options_.first_timeout;
    if (!async && !launches_now && queue_->is_empty()) {
      WorkState work(std::move(issued));
      work.run();
      queue_->await_finished();  // operations are done in the order of issue
      return {};
    }
    issued.buffers_are_in_stream_order = launches_now && std::ranges::all_of(tensors, is_in_stream_order);
    if (issued.buffers_are_in_stream_order) record_current_stream(tensors);
    if (!tensors.empty()) issued.buffers = std::make_shared<std::vector<at::Tensor>>(std::move(tensors));
    auto work = std::make_shared<WorkState>(std::move(issued));
    if (launches_now) work->launch();
    if (!engine_) engine_ = ProgressEngine::shared();
    engine_->submit(queue_, work);
    if (!async) work->wait();
    return Work(std::move(work));
  }

  Work all_gather(at::Tensor output, at::Tensor input, std::vector<std::int64_t> counts, bool is_uneven, bool async) {
    const char* const what = is_uneven ? "all_gather_uneven" : "all_gather";
    OperationDescription d = describe(Verb::all_gather, output, input, what);
    check_parts(output, input, counts, is_uneven, /*is_whole_output=*/true, what);
    d.counts = std::move(counts);
    return issue(std::move(d), async, {std::move(output), std::move(input)});
  }

  Work reduce_scatter(at::Tensor output, at::Tensor input, std::vector<std::int64_t> counts, bool is_uneven,
                      ReduceOptions options) {
    const char* const what = is_uneven ? "reduce_scatter_uneven" : "reduce_scatter";
    OperationDescription d = describe(Verb::reduce_scatter, output, input, what);
    set_op(d, options.op, what);
    check_parts(input, output, counts, is_uneven, /*is_whole_output=*/false, what);
    d.counts = std::move(counts);
    return issue(std::move(d), options.async, {std::move(output), std::move(input)});
  }

  ByteObjects byte_objects() {
    return {rank(), size(), [this](OperationDescription description) { issue(std::move(description), false); }};
  }

  std::shared_ptr<Communicator> split(int color, int key, std::string name, bool host_only = false) {
    const std::uint64_t serial = splits_++;
    const std::string mine = fmt::format("{} {} {}", color, key, name);
    SplitRequest request;
    std::vector<std::pair<int, int>> members;  // (key, rank)
    int rank_of_text = 0;
    for (const std::string& text : byte_objects().all_gather(mine)) {
      std::size_t after_color = 0;
      const int its_color = std::stoi(text, &after_color);
      const int its_key = std::stoi(text.substr(after_color));
      if (color >= 0 && its_color == color) members.emplace_back(its_key, rank_of_text);
      ++rank_of_text;
    }
    std::ranges::sort(members);
    for (const auto& [its_key, its_rank] : members) {
      if (its_rank == rank()) request.rank = static_cast<int>(request.members.size());
      request.members.push_back(its_rank);
    }
    request.name = name.empty() ? fmt::format("{}.{}.{}", *name_, serial, color) : std::move(name);
    request.serial = serial;
    request.exchange = [this](const std::string& value) { return byte_objects().all_gather(value); };
    std::shared_ptr<Backend> backend;
    try {
      backend = host_only ? backend_->split_host(request) : backend_->split(request);
    } catch (const CommError& error) {
      const std::string text = fmt::format("split(color {}, key {}), of group '{}', rank {} of {}: {}", color, key,
                                           *name_, this->rank(), size(), error.what());
      family_->logs->dump(text);
      throw CommError(text);
    }
    if (!backend) return nullptr;
    CommunicatorOptions options = options_;
    options.name = request.name;
    std::vector<int> in_first;
    for (const int member : request.members) in_first.push_back(members_[static_cast<std::size_t>(member)]);
    return std::shared_ptr<Communicator>(
        new Communicator(std::make_unique<Impl>(std::move(backend), std::move(options), family_,
                                                fmt::format("{}/{}.{}", id_, serial, color), std::move(in_first))));
  }

  at::Tensor symmetric_empty(at::IntArrayRef sizes, const at::TensorOptions& options, SymmetricOptions symmetric) {
    const auto dtype = c10::typeMetaToScalarType(options.dtype());
    const std::string mine = fmt::format("{}[{}] on {}", c10::toString(dtype), fmt::join(sizes, ", "),
                                         options.device().type() == c10::DeviceType::CPU ? "the host" : "a device");
    const auto requests = byte_objects().all_gather(mine);
    for (std::size_t r = 0; r < requests.size(); ++r)
      if (requests[r] != mine)
        throw CommError(
            fmt::format("symmetric_empty: the ranks of group '{}' ask for different tensors: rank {}: {}; "
                        "rank {}: {}",
                        *name_, rank(), mine, r, requests[r]));
    if (!options.device().is_cpu()) return at::empty(sizes, options);
    const auto bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
    auto memory = backend_->make_symmetric(
        bytes, symmetric, [this](const std::string& value) { return byte_objects().all_gather(value); });
    if (!memory) return at::empty(sizes, options);
    void* const data = memory.get();
    return at::from_blob(
        data, sizes, [memory = std::move(memory)](void*) {}, options.device(at::kCPU));
  }

  OwnerProcess owner_;
  std::shared_ptr<Backend> backend_;
  CommunicatorOptions options_;
  std::shared_ptr<const std::string> name_;
  BackendTraits traits_;
  std::string id_;            // the path of splits from the first communicator to this one
  std::vector<int> members_;  // [size]: ranks of the first communicator
  std::shared_ptr<Family> family_;
  std::shared_ptr<FlightLog> flight_;
  std::shared_ptr<OperationQueue> queue_ = std::make_shared<OperationQueue>();
  std::shared_ptr<ProgressEngine> engine_;  // from the first asynchronous operation on
  std::uint64_t sequence_ = 0;
  std::uint64_t p2p_sequence_ = 0;
  std::uint64_t splits_ = 0;
};

Communicator::Communicator(std::shared_ptr<Backend> backend, CommunicatorOptions options)
    : impl_(std::make_unique<Impl>(std::move(backend), std::move(options))) {}

Communicator::Communicator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
// A forked child keeps the memory: to end what is in it would end the parent's connections.
Communicator::~Communicator() {
  if (!impl_->owner_.is_this_process()) {
    [[maybe_unused]] Impl* const parents = impl_.release();
  }
}

int Communicator::rank() const noexcept { return impl_->rank(); }
int Communicator::size() const noexcept { return impl_->size(); }
const std::string& Communicator::name() const noexcept { return *impl_->name_; }
std::string Communicator::backend_name() const { return std::string(impl_->traits_.name); }
std::shared_ptr<Backend> Communicator::backend() const { return impl_->backend_; }

Work Communicator::broadcast(at::Tensor tensor, RootedOptions options) {
  OperationDescription d = impl_->describe(Verb::broadcast, tensor, "broadcast");
  impl_->set_root(d, options.root, "broadcast");
  Impl::write_to(d, tensor);
  return impl_->issue(std::move(d), options.async, {std::move(tensor)});
}

Work Communicator::all_reduce(at::Tensor tensor, ReduceOptions options) {
  OperationDescription d = impl_->describe(Verb::all_reduce, tensor, "all_reduce");
  Impl::set_op(d, options.op, "all_reduce");
  Impl::write_to(d, tensor);
  return impl_->issue(std::move(d), options.async, {std::move(tensor)});
}

Work Communicator::reduce(at::Tensor tensor, RootedReduceOptions options) {
  OperationDescription d = impl_->describe(Verb::reduce, tensor, "reduce");
  Impl::set_op(d, options.op, "reduce");
  impl_->set_root(d, options.root, "reduce");
  Impl::write_to(d, tensor);
  return impl_->issue(std::move(d), options.async, {std::move(tensor)});
}

Work Communicator::all_gather(at::Tensor output, at::Tensor input, CommOptions options) {
  return impl_->all_gather(std::move(output), std::move(input), {}, /*is_uneven=*/false, options.async);
}

Work Communicator::all_gather_uneven(at::Tensor output, at::Tensor input, std::vector<std::int64_t> counts,
                                     CommOptions options) {
  return impl_->all_gather(std::move(output), std::move(input), std::move(counts), /*is_uneven=*/true, options.async);
}

Work Communicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOptions options) {
  return impl_->reduce_scatter(std::move(output), std::move(input), {}, /*is_uneven=*/false, options);
}

Work Communicator::reduce_scatter_uneven(at::Tensor output, at::Tensor input, std::vector<std::int64_t> counts,
                                         ReduceOptions options) {
  return impl_->reduce_scatter(std::move(output), std::move(input), std::move(counts), /*is_uneven=*/true, options);
}

Work Communicator::gather(at::Tensor output, at::Tensor input, RootedOptions options) {
  OperationDescription d = impl_->describe(Verb::gather, input, "gather");
  impl_->set_root(d, options.root, "gather");
  Impl::read_from(d, input);
  if (rank() == options.root) {
    Impl::check_same_type(impl_->check(output, "gather"), d.dtype, "gather");
    impl_->check_parts(output, input, {}, /*is_uneven=*/false, /*is_whole_output=*/true, "gather");
    Impl::write_to(d, output);
  }
  return impl_->issue(std::move(d), options.async, {std::move(output), std::move(input)});
}

Work Communicator::scatter(at::Tensor output, at::Tensor input, RootedOptions options) {
  OperationDescription d = impl_->describe(Verb::scatter, output, "scatter");
  impl_->set_root(d, options.root, "scatter");
  Impl::write_to(d, output);
  if (rank() == options.root) {
    Impl::check_same_type(d.dtype, impl_->check(input, "scatter"), "scatter");
    impl_->check_parts(input, output, {}, /*is_uneven=*/false, /*is_whole_output=*/false, "scatter");
    Impl::read_from(d, input);
  }
  return impl_->issue(std::move(d), options.async, {std::move(output), std::move(input)});
}

Work Communicator::all_to_all(at::Tensor output, at::Tensor input, CommOptions options) {
  OperationDescription d = impl_->describe(Verb::all_to_all, output, input, "all_to_all");
  Impl::check_count(output.numel(), input.numel(), "output", "all_to_all");
  if (input.numel() % size() != 0)
    throw Error(fmt::format("all_to_all: {} elements cannot be divided among {} ranks; use all_to_all_uneven",
                            input.numel(), size()));
  Impl::check_overlap(output, input, -1, "all_to_all");
  return impl_->issue(std::move(d), options.async, {std::move(output), std::move(input)});
}

Work Communicator::all_to_all_uneven(at::Tensor output, at::Tensor input, std::vector<std::int64_t> output_counts,
                                     std::vector<std::int64_t> input_counts, CommOptions options) {
  constexpr const char* kWhat = "all_to_all_uneven";
  OperationDescription d = impl_->describe(Verb::all_to_all, output, input, kWhat);
  Impl::check_count(output.numel(), impl_->check_counts(output_counts, kWhat), "output", kWhat);
  Impl::check_count(input.numel(), impl_->check_counts(input_counts, kWhat), "input", kWhat);
  Impl::check_overlap(output, input, -1, kWhat);
  d.input_counts = std::move(input_counts);
  d.output_counts = std::move(output_counts);
  return impl_->issue(std::move(d), options.async, {std::move(output), std::move(input)});
}

Work Communicator::send(at::Tensor tensor, int destination, P2POptions options) {
  OperationDescription d = impl_->describe(Verb::send, tensor, "send");
  impl_->check_peer(destination, "send");
  if (destination == rank() && !options.async)
    throw Error("send: a rank that sends to itself must do so asynchronously or in a batch");
  d.transfers.push_back(
      {true, const_cast<void*>(tensor.const_data_ptr()), tensor.numel(), d.dtype, destination, options.tag});
  return impl_->issue(std::move(d), options.async, {std::move(tensor)});
}

Work Communicator::recv(at::Tensor tensor, int source, P2POptions options) {
  OperationDescription d = impl_->describe(Verb::recv, tensor, "recv");
  impl_->check_peer(source, "recv");
  d.transfers.push_back({false, tensor.mutable_data_ptr(), tensor.numel(), d.dtype, source, options.tag});
  return impl_->issue(std::move(d), options.async, {std::move(tensor)});
}

Work Communicator::barrier(CommOptions options) {
  OperationDescription d;
  d.verb = Verb::barrier;
  return impl_->issue(std::move(d), options.async);
}

Work Communicator::batch_isend_irecv(std::vector<P2POp> operations, CommOptions options) {
  if (operations.empty()) return {};
  OperationDescription d;
  d.verb = Verb::batch_isend_irecv;
  std::vector<at::Tensor> tensors;
  for (P2POp& one : operations) {
    const DataType dtype = impl_->check(one.tensor, "batch_isend_irecv");
    impl_->check_peer(one.peer, "batch_isend_irecv");
    void* data = one.is_send ? const_cast<void*>(one.tensor.const_data_ptr()) : one.tensor.mutable_data_ptr();
    d.transfers.push_back({one.is_send, data, one.tensor.numel(), dtype, one.peer, one.tag});
    tensors.push_back(std::move(one.tensor));
  }
  return impl_->issue(std::move(d), options.async, std::move(tensors));
}

std::string Communicator::broadcast_bytes(std::string value, int root) {
  impl_->check_root(root, "broadcast_bytes");
  return impl_->byte_objects().broadcast(std::move(value), root);
}
std::vector<std::string> Communicator::all_gather_bytes(const std::string& value) {
  return impl_->byte_objects().all_gather(value);
}
std::vector<std::string> Communicator::gather_bytes(const std::string& value, int root) {
  impl_->check_root(root, "gather_bytes");
  return impl_->byte_objects().gather(value, root);
}
std::string Communicator::scatter_bytes(const std::vector<std::string>& values, int root) {
  impl_->check_root(root, "scatter_bytes");
  if (rank() == root && static_cast<int>(values.size()) != size())
    throw Error(fmt::format("scatter_bytes: {} values for {} ranks", values.size(), size()));
  return impl_->byte_objects().scatter(values, root);
}
std::shared_ptr<Communicator> Communicator::split(int color, int key, std::string name) {
  return impl_->split(color, key, std::move(name));
}
std::shared_ptr<Communicator> Communicator::split_host(std::string name) {
  return impl_->split(0, rank(), std::move(name), /*host_only=*/true);
}

at::Tensor Communicator::symmetric_empty(at::IntArrayRef sizes, at::TensorOptions options, SymmetricOptions symmetric) {
  return impl_->symmetric_empty(sizes, options, symmetric);
}

void Communicator::mark_started() { impl_->family_->is_started.store(true, std::memory_order_relaxed); }
bool Communicator::is_idle() const {
  const std::lock_guard lock(impl_->family_->mutex);
  return std::ranges::all_of(impl_->family_->queues, [](const auto& one) {
    const auto queue = one.lock();
    return !queue || queue->is_empty();
  });
}
void Communicator::dump_flight_recorder(const std::string& path) const {
  replace_file(path, impl_->family_->logs->to_json("asked for"));
}

std::vector<observe::FlightEntry> Communicator::recent_operations() const { return impl_->flight_->snapshot(); }

void Communicator::abort(const std::string& reason) {
  impl_->backend_->abort(fmt::format("rank {} of group '{}': {}", rank(), name(), reason));
}

}  // namespace phalanx
