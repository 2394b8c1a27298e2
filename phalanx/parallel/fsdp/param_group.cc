#include "phalanx/parallel/fsdp/param_group.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"
#include "phalanx/comm/data_type.h"
#include "phalanx/observe/memory_counters.h"

namespace phalanx::fsdp {
namespace {

// Peers read each part only for a moment, and then not again until the next step.
constexpr SymmetricOptions kSharded{.keeps_peers_mapped = false};

constexpr std::int64_t kAlignment = 256;  // bytes, of the frozen parameters behind the trained ones

std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::vector<std::int64_t> with_rows(const at::Tensor& tensor, std::int64_t rows) {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

// The spec of this rank's rows: of all of the parameter, or of a part that tensor parallelism has already cut.
Shard shard_of(const NamedTensor& p, Split rows, const ParamGroupOptions& options) {
  if (!p.shard) {
    const ShardSpec spec(p.name, p.tensor.sizes().vec(), data_type_of(p.tensor.scalar_type()), options.mesh,
                         {.splits = {std::move(rows)}, .partial = {}});
    return {spec, options.mesh_rank};
  }
  Placement placement = p.shard->spec.placement();
  placement.splits.push_back(std::move(rows));
  return {p.shard->spec.with(std::move(placement)), p.shard->rank};
}

}  // namespace

ParamGroup::ParamGroup(std::string name, std::vector<NamedTensor> parameters, std::shared_ptr<Communicator> comm,
                       const ParamGroupOptions& options)
    : name_(std::move(name)),
      comm_(std::move(comm)),
      post_forward_group_(options.post_forward_group),
      gradient_reduction_(options.gradient_reduction),
      resident_(options.resident),
      own_grads_(options.own_grads),
      offload_(options.offload),
      gathered_on_use_(options.gathered_on_use) {
  const at::NoGradGuard no_grad;
  const bool trains = std::ranges::any_of(parameters, [](const NamedTensor& p) { return p.tensor.requires_grad(); });
  const at::ScalarType first_type = parameters.front().tensor.scalar_type();
  const auto others = std::stable_partition(  // clang 14 cannot read std::ranges' own
      parameters.begin(), parameters.end(),
      [&](const NamedTensor& p) { return trains ? p.tensor.requires_grad() : p.tensor.scalar_type() == first_type; });
  if (others != parameters.end()) {
    frozen_ = std::make_unique<ParamGroup>(name_, std::vector(others, parameters.end()), comm_, options);
    parameters.erase(others, parameters.end());
  }
  check(parameters, options);
  const at::TensorOptions given = parameters.front().tensor.options().requires_grad(false);
  const at::ScalarType type = parameters.front().tensor.scalar_type();
  const bool is_floating = parameters.front().tensor.is_floating_point();
  options_ = given.dtype(is_floating ? options.param_dtype.value_or(type) : type);
  grad_options_ =
      options_.dtype(is_floating ? options.reduce_dtype.value_or(c10::typeMetaToScalarType(options_.dtype())) : type);
  shard_options_ = offload_ ? on_host(given) : given;
  direct_ = !offload_ && given.dtype() == options_.dtype();
  std::vector<FlatParameter> shapes;
  for (const auto& p : parameters) {
    const std::int64_t rows = p.tensor.size(0);
    shapes.push_back({rows, rows > 0 ? p.tensor.numel() / rows : 1});
  }
  layout_ = lay_out_flat(shapes, comm_->size());
  full_ = FlatBuffer(layout_.flat_elements(), options_);
  full_.set_missing_text(fmt::format(
      "fully_shard: a parameter of unit {} ('{}', ...) is read while it is sharded: run a phalanx::nn::Module "
      "by nn::call(), not by its forward(); read parameters by FullyShardedDataParallel::parameters()",
      name_, parameters.front().name));
  grads_ = FlatBuffer(layout_.flat_elements(), grad_options_);
  for (auto& p : parameters) {
    const bool is_trained = p.tensor.requires_grad();
    parameters_.push_back({.full = std::move(p), .is_trained = is_trained});
  }
  make_shard(options);
  const observe::MemoryScope scope(observe::MemoryCategory::buffers);
  if (post_forward_group_)
    sharded_post_forward_ = post_forward_group_->symmetric_empty(
        {layout_.flat_elements() / post_forward_group_->size()}, options_, kSharded);
}

void ParamGroup::check(const std::vector<NamedTensor>& parameters, const ParamGroupOptions& options) const {
  const auto has_axis = [&](const Shard& shard) {
    const MeshShape& mesh = shard.spec.mesh();
    return mesh.has(options.shard_axis) && mesh.axes()[mesh.index_of(options.shard_axis)].size == comm_->size();
  };

  for (const auto& [name, tensor, shard] : parameters) {
    const at::Tensor& first = parameters.front().tensor;
    if (shard && !has_axis(*shard)) {
      throw ConfigError(
          fmt::format("fully_shard: '{}' is split already, {}: expected a mesh with the axis '{}' of {} ranks, so make "
                      "that split on the whole mesh",
                      name, shard->spec.text(), options.shard_axis, comm_->size()));
    }
    if (tensor.dim() == 0) {
      throw Error(
          fmt::format("fully_shard: parameter '{}' has no dimensions and cannot be cut; make it one of shape "
                      "[1]",
                      name));
    }
    if (tensor.scalar_type() != first.scalar_type() || tensor.device() != first.device()) {
      throw Error(
          fmt::format("fully_shard: unit '{}' holds '{}' ({} on {}) and '{}' ({} on {}); expected one dtype and "
                      "one device in a unit: put them into different units",
                      name_, parameters.front().name, c10::toString(first.scalar_type()), first.device().str(), name,
                      c10::toString(tensor.scalar_type()), tensor.device().str()));
    }
    if (!tensor.is_floating_point() && tensor.scalar_type() != at::kByte) {
      throw Error(fmt::format("fully_shard: parameter '{}' has dtype {}; expected a floating-point dtype, or bytes",
                              name, c10::toString(tensor.scalar_type())));
    }
  }
}

at::Tensor ParamGroup::slice_of(const at::Tensor& flat) const {
  return flat.narrow(0, comm_->rank() * layout_.shard_elements, layout_.shard_elements);
}

// Host memory that the device can copy from and to directly.
at::TensorOptions ParamGroup::on_host(at::TensorOptions options) const {
  const bool on_device = !options.device().is_cpu();
  return options.device(at::kCPU).pinned_memory(on_device);
}

// Makes the shard with this rank's rows, and makes the module's parameters views of a buffer that may have no memory.
void ParamGroup::make_shard(const ParamGroupOptions& options) {
  const observe::MemoryScope scope(observe::MemoryCategory::parameters);
  if (resident_) full_.attach(comm_->symmetric_empty({layout_.flat_elements()}, options_, kSharded).zero_());
  if (resident_ && direct_) {
    shard_ = slice_of(full_.tensor());
  } else if (direct_) {
    shard_ = comm_->symmetric_empty({layout_.shard_elements}, shard_options_, kSharded).zero_();
  } else {
    shard_ = at::zeros({layout_.shard_elements}, shard_options_);
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& p = parameters_[i];
    std::vector<std::int64_t> rows_of_ranks;
    for (int rank = 0; rank < comm_->size(); ++rank) {
      const RowRange rows = layout_.rows_of(i, rank);
      rows_of_ranks.push_back(rows.end - rows.begin);
    }
    const at::Tensor& full = p.full.tensor;
    const RowRange mine = layout_.rows_of(i, comm_->rank());
    const std::int64_t row = layout_.parameters[i].row_elements;
    const std::int64_t begin =
        mine.begin < mine.end ? layout_.offsets[i] + mine.begin * row - comm_->rank() * layout_.shard_elements : 0;
    const auto sizes = with_rows(full, mine.end - mine.begin);
    const at::Tensor rows = shard_.narrow(0, begin, (mine.end - mine.begin) * row).view(sizes).variable_data();
    if (phalanx::has_memory(full)) rows.copy_(full.narrow(0, mine.begin, mine.end - mine.begin));
    Split split{.axis = options.shard_axis, .dim = 0, .sizes = std::move(rows_of_ranks)};
    p.shard = {p.full.name, rows, std::make_shared<const Shard>(shard_of(p.full, std::move(split), options))};
    p.grad_view = grads_.view(full.sizes(), layout_.offsets[i]);
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].full.tensor;
    const at::Tensor view = full_.view(parameter.sizes(), layout_.offsets[i]);
    parameter.set_data(options.watched ? watched_view(view) : view);
  }
  unsharded_ = comm_->size() == 1 && direct_;
}

const ParamGroup::Parameter& ParamGroup::at(std::size_t i) const {
  return i < parameters_.size() ? parameters_[i] : frozen_->at(i - parameters_.size());
}

void ParamGroup::watch(std::weak_ptr<UseListener> listener, std::size_t number) {
  if (frozen_) frozen_->watch(listener, number);
  fsdp::watch(full_.tensor().storage(), std::move(listener), number);
}

std::int64_t ParamGroup::own_bytes() const noexcept {
  return layout_.flat_elements() * static_cast<std::int64_t>(options_.dtype().itemsize());
}

std::int64_t ParamGroup::bytes() const noexcept {
  return frozen_ ? aligned(own_bytes()) + frozen_->bytes() : own_bytes();
}

std::int64_t ParamGroup::padding_bytes() const noexcept {
  return layout_.padding() * own_bytes() / layout_.flat_elements() + (frozen_ ? frozen_->padding_bytes() : 0);
}

std::int64_t ParamGroup::grad_bytes() const noexcept {
  if (!has_trained()) return 0;
  return layout_.flat_elements() * static_cast<std::int64_t>(grad_options_.dtype().itemsize());
}

std::int64_t ParamGroup::shard_bytes() const noexcept {
  return layout_.shard_elements * static_cast<std::int64_t>(shard_options_.dtype().itemsize());
}

std::int64_t ParamGroup::resident_bytes() const noexcept {
  const std::int64_t beside_full = resident_ && direct_ ? 0 : shard_bytes(), of_full = own_bytes();
  return beside_full + (resident_ ? of_full : 0) + (post_forward_group_ ? of_full / post_forward_group_->size() : 0) +
         (frozen_ ? frozen_->resident_bytes() : 0);
}

std::int64_t ParamGroup::reduced_bytes() const noexcept {
  const bool in_grads = own_grads_ && !offload_;
  return in_grads || !has_trained() ? 0 : grad_bytes() / layout_.ranks;
}

void ParamGroup::attach(const at::Tensor& memory) {
  full_.attach(memory);
  if (frozen_) frozen_->attach(memory.narrow(0, aligned(own_bytes()), frozen_->bytes()));
}

void ParamGroup::unshard(const CopyStream& from_host) {
  PHALANX_ASSERT(!is_unsharded(), "a group that is unsharded is not gathered again");
  if (frozen_ && !frozen_->is_unsharded()) frozen_->unshard(from_host);
  if (unsharded_) return;
  unsharded_ = true;
  if (is_sharded_post_forward_) {
    all_gather_ = post_forward_group_->all_gather(full_.tensor(), sharded_post_forward_, {.async = true});
    return;
  }
  gathered_version_ = shard_version();
  const auto gather = [this] {
    const at::Tensor mine = direct_ ? shard_ : slice_of(full_.tensor());
    if (!direct_) mine.copy_(shard_, /*non_blocking=*/true);
    if (comm_->size() > 1) all_gather_ = comm_->all_gather(full_.tensor(), mine, {.async = true});
  };
  if (offload_) {
    came_from_host_ = from_host.run(gather);
  } else {
    gather();
  }
}

// Every write in place counts the version up.
std::uint64_t ParamGroup::shard_version() const {
  std::uint64_t version = 0;
  for (const Parameter& parameter : parameters_) version += parameter.shard.tensor._version();
  return version;
}

bool ParamGroup::is_current() const {
  if (frozen_ && !frozen_->is_current()) return false;
  return (comm_->size() == 1 && direct_) || gathered_version_ == shard_version();
}

void ParamGroup::wait_for_unshard() {
  if (frozen_) frozen_->wait_for_unshard();
  CopyStream::current_waits(std::exchange(came_from_host_, nullptr));
  all_gather_.wait();
  all_gather_ = Work();
}

void ParamGroup::to_sharded_post_forward() {
  if (frozen_) frozen_->to_sharded_post_forward();
  if (!post_forward_group_ || !unsharded_) return;
  wait_for_unshard();
  sharded_post_forward_.copy_(full_.tensor().narrow(0, post_forward_group_->rank() * sharded_post_forward_.numel(),
                                                    sharded_post_forward_.numel()));
  is_sharded_post_forward_ = true;
}

void ParamGroup::invalidate_unsharded() {
  if (frozen_) frozen_->invalidate_unsharded();
  wait_for_unshard();
  unsharded_ = comm_->size() == 1 && direct_;
  is_sharded_post_forward_ = false;
}

at::Tensor ParamGroup::detach() {
  if (frozen_) frozen_->detach();
  wait_for_unshard();
  unsharded_ = false;
  return full_.detach();  // the whole piece
}

at::Tensor ParamGroup::detach_grads() {
  if (keeps_grads_) return {};
  for (const Parameter& p : parameters_) {
    if (p.is_trained) reclaim_grad_buffer(p.full.tensor);
  }
  return grads_.detach();
}

void ParamGroup::keep_grads(const at::Tensor& memory) {
  grads_.attach(memory);
  keeps_grads_ = true;
}

void ParamGroup::offer_grad_buffers() {
  if (grad_options_.dtype() != options_.dtype()) return;
  for (const Parameter& p : parameters_) {
    const at::Tensor& tensor = p.full.tensor;
    if (p.is_trained && !p.grad_view.is_same(grad_buffer(tensor))) set_grad_buffer(tensor, p.grad_view);
  }
}

void ParamGroup::withdraw_grad_buffers() {
  for (const Parameter& p : parameters_) {
    if (p.is_trained) set_grad_buffer(p.full.tensor, at::Tensor());
  }
}

void ParamGroup::place_grad(std::size_t i) {
  auto& p = parameters_[i];
  at::Tensor& grad = p.full.tensor.mutable_grad();
  if (grad.is_same(p.grad_view)) return;
  if (grad.is_sparse()) {
    throw Error(
        fmt::format("fully_shard: the gradient of '{}' is sparse; expected a dense one (an embedding must be "
                    "made with sparse(false))",
                    p.full.name));
  }
  if (grad_options_.dtype() != options_.dtype()) {
    p.is_placed ? p.grad_view.add_(grad) : p.grad_view.copy_(grad);
    p.is_placed = true;
    grad.reset();
    return;
  }
  reclaim_grad_buffer(p.full.tensor);
  p.grad_view.copy_(grad);
  grad = p.grad_view;
}

void ParamGroup::to_accumulated_grads() {
  if (grad_options_.dtype() == options_.dtype()) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].is_trained && parameters_[i].full.tensor.grad().defined()) place_grad(i);
  }
}

void ParamGroup::show_grads() {
  for (auto& p : parameters_) {
    if (std::exchange(p.is_placed, false)) p.full.tensor.mutable_grad() = p.grad_view;
  }
}

bool ParamGroup::has_trained() const { return std::ranges::any_of(parameters_, &Parameter::is_trained); }

bool ParamGroup::has_shard_grads() const {
  return std::ranges::any_of(parameters_, [](const Parameter& p) { return p.shard.tensor.grad().defined(); });
}

void ParamGroup::carry_reduced() {
  const bool is_overwritten = own_grads_ && !offload_;
  for (auto& p : parameters_) {
    const at::Tensor& grad = p.shard.tensor.grad();
    if (!grad.defined()) {
      p.carried.reset();
    } else if (!p.carried.defined()) {
      p.carried = is_overwritten ? grad.clone() : grad;
    }
  }
}

void ParamGroup::start_reduce_scatter() {
  const observe::MemoryScope scope(observe::MemoryCategory::gradients);
  const bool in_grads = own_grads_ || offload_;
  PHALANX_ASSERT(grads_.is_attached(), "gradients are reduced where they were accumulated");
  reduced_ = in_grads ? slice_of(grads_.tensor()) : at::empty({layout_.shard_elements}, grad_options_);
  if (comm_->size() > 1) {
    reduce_scatter_ = comm_->reduce_scatter(reduced_, grads_.tensor(), {.op = gradient_reduction_, .async = true});
  }
}

void ParamGroup::finish_reduce_scatter() {
  reduce_scatter_.wait();
  reduce_scatter_ = Work();
  drop_full_grads();
}

void ParamGroup::add_to_partial_reduce_output() {
  const observe::MemoryScope scope(observe::MemoryCategory::gradients);
  const at::Tensor reduced = std::exchange(reduced_, at::Tensor());
  const at::ScalarType type = c10::promoteTypes(reduced.scalar_type(), at::kFloat);
  if (partial_reduce_output_.defined()) {
    partial_reduce_output_.add_(reduced);
  } else if (reduced.scalar_type() == type) {
    partial_reduce_output_ = reduced;
  } else {
    const at::TensorOptions options = reduced.options().dtype(type);
    partial_reduce_output_ =
        at::empty(reduced.sizes(), offload_ ? options.pinned_memory(reduced.is_pinned()) : options).copy_(reduced);
  }
}

void ParamGroup::fetch_partial_reduce_output(const CopyStream& from_host) {
  if (!offload_ || !partial_reduce_output_.defined()) return;
  const observe::MemoryScope scope(observe::MemoryCategory::gradients);
  const at::Tensor on_host = partial_reduce_output_;
  partial_reduce_output_ = at::empty(on_host.sizes(), on_host.options().device(options_.device()).pinned_memory(false));
  from_host.keep_until_done(partial_reduce_output_);
  sum_came_from_host_ = from_host.run([&] { partial_reduce_output_.copy_(on_host, /*non_blocking=*/true); });
}

void ParamGroup::take_partial_reduce_output() {
  if (!partial_reduce_output_.defined()) return;
  CopyStream::current_waits(std::exchange(sum_came_from_host_, nullptr));
  reduced_ = std::exchange(partial_reduce_output_, at::Tensor()).add_(reduced_);
}

Work ParamGroup::reduce_over(Communicator& replicas) {
  PHALANX_ASSERT(reduced_.defined(), "replicas average what the shards have reduced");
  reduced_ = reduced_.to(c10::typeMetaToScalarType(grad_options_.dtype()));
  return replicas.all_reduce(reduced_, {.op = gradient_reduction_, .async = true});
}

CopyStream::Mark ParamGroup::copy_to_host(const CopyStream& to_host) {
  PHALANX_ASSERT(offload_, "only gradients of a shard on the host go there");
  const observe::MemoryScope scope(observe::MemoryCategory::gradients);
  const at::Tensor on_device = reduced_;
  reduced_ = at::empty({layout_.shard_elements}, on_host(on_device.options()));
  to_host.keep_until_done(on_device);
  return to_host.run([&] { reduced_.copy_(on_device, /*non_blocking=*/true); });
}

void ParamGroup::publish_grads() {
  PHALANX_ASSERT(reduced_.defined(), "gradients are published after they were reduced");
  const at::Tensor reduced = std::exchange(reduced_, at::Tensor());
  for (Parameter& p : parameters_) {
    if (!p.is_trained) continue;
    const at::Tensor& rows = p.shard.tensor;
    const std::int64_t begin = rows.numel() > 0 ? rows.storage_offset() - shard_.storage_offset() : 0;
    const at::Tensor grad = reduced.narrow(0, begin, rows.numel()).view(rows.sizes()).variable_data();
    if (p.carried.defined()) grad.add_(std::exchange(p.carried, at::Tensor()));
    rows.mutable_grad() = grad;
  }
}

void ParamGroup::drop_full_grads() {
  for (auto& p : parameters_) {
    p.full.tensor.mutable_grad().reset();
    p.is_placed = false;
  }
}

}  // namespace phalanx::fsdp
