#include "phalanx/measure/collectives/comm_bench_call.h"

#include <ATen/ops/ne.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/data_type.h"

namespace phalanx::measure {
namespace {

constexpr std::int64_t kPeriod = 7;

/// The value of rank r at element i. For a product only one rank has a 2, so that no type overflows.
double known_value(const CommBenchCase& what, int rank, int ranks, std::int64_t i) {
  // Some elements are true on all ranks, some on none, and some on a few, so that "and" and "or" give both results. For
  // the last kind the pattern of one rank is not a shifted copy of another rank's.
  if (what.type == DataType::boolean)
    return i % 5 == 0 || (i % 5 > 1 && (i % 11 + 1) * (7 * rank + 3) % 13 < 6) ? 1 : 0;
  if (reduces(what.verb) && what.op == ReduceOp::product) return (i + rank) % std::max(2, ranks) == 0 ? 2 : 1;
  return static_cast<double>((3 * i + 5 * rank) % kPeriod + 1);
}

double known_result(const CommBenchCase& what, int ranks, std::int64_t i) {
  double result = known_value(what, 0, ranks, i);
  for (int rank = 1; rank < ranks; ++rank) {
    const double next = known_value(what, rank, ranks, i);
    if (what.op == ReduceOp::min) {
      result = std::min(result, next);
    } else if (what.op == ReduceOp::max || (what.type == DataType::boolean && what.op != ReduceOp::product)) {
      result = std::max(result, next);  // the sum of booleans is "any"
    } else if (what.op == ReduceOp::product) {
      result *= next;
    } else {
      result += next;
    }
  }
  if (what.op != ReduceOp::avg) return result;
  return what.type == DataType::f64 ? result / ranks : static_cast<float>(result) / static_cast<float>(ranks);
}

/// value(begin), value(begin + 1), ...; value repeats after `period`, so a large buffer costs one copy.
template <class Value>
at::Tensor periodic(const at::Tensor& like, std::int64_t begin, std::int64_t period, Value value) {
  at::Tensor once = at::zeros({period}, at::TensorOptions(c10::ScalarType::Double));
  auto* data = once.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < period; ++i) data[i] = value(begin + i);
  const std::int64_t times = (like.numel() + period - 1) / period;
  // Convert through int64, so that values that do not fit into a byte wrap. Fractions occur only with avg, which is not
  // available for integers.
  if (c10::isIntegralType(like.scalar_type(), /*includeBool=*/false)) once = once.to(c10::ScalarType::Long);
  return once.to(like.scalar_type()).repeat({times}).narrow(0, 0, like.numel()).to(like.device());
}

std::int64_t differing(const at::Tensor& found, const at::Tensor& expected) {
  return at::ne(found, expected).sum().item<std::int64_t>();
}

c10d::ReduceOp c10d_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::product:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::sum:
    case ReduceOp::avg:
      break;
  }
  return c10d::ReduceOp::SUM;
}

/// One call of torch's process group. The tensors are captured by value; they are handles.
std::function<void()> c10d_call(const c10::intrusive_ptr<c10d::Backend>& group, const CommBenchCase& what, int rank,
                                int ranks, const BenchBuffers& buffers) {
  if (reduces(what.verb) && what.op == ReduceOp::avg) throw Error("c10d's gloo has no avg");
  const auto op = c10d_op(what.op);
  const std::int64_t root = what.root;
  const int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
  at::Tensor whole = buffers.whole, part = buffers.part, received = buffers.received;
  std::vector<at::Tensor> list{whole}, parts{part}, into{received};
  std::vector<std::vector<at::Tensor>> slices;
  if (is_rooted(what.verb) && rank == what.root) slices = {whole.chunk(ranks)};
  switch (what.verb) {
    case BenchVerb::all_reduce:
      return [=]() mutable { group->allreduce(list, {.reduceOp = op})->wait(); };
    case BenchVerb::all_gather:
      return [=]() mutable { group->_allgather_base(whole, part)->wait(); };
    case BenchVerb::reduce_scatter:
      return [=]() mutable { group->_reduce_scatter_base(part, whole, {.reduceOp = op})->wait(); };
    case BenchVerb::broadcast:
      return [=]() mutable { group->broadcast(list, {.rootRank = root})->wait(); };
    case BenchVerb::reduce:
      return [=]() mutable { group->reduce(list, {.reduceOp = op, .rootRank = root})->wait(); };
    case BenchVerb::gather:
      return [=]() mutable { group->gather(slices, parts, {.rootRank = root})->wait(); };
    case BenchVerb::scatter:
      return [=]() mutable { group->scatter(parts, slices, {.rootRank = root})->wait(); };
    case BenchVerb::all_to_all:
      return [=, even = std::vector<std::int64_t>()]() mutable {
        group->alltoall_base(received, whole, even, even)->wait();
      };
    case BenchVerb::sendrecv:
      return [=]() mutable {
        const auto sent = group->send(list, next, 0);
        group->recv(into, before, 0)->wait();
        sent->wait();
      };
    case BenchVerb::pingpong:
      return [=]() mutable {
        if (rank > 1) return;
        if (rank == 0) group->send(list, 1, 0)->wait();
        group->recv(list, 1 - rank, 0)->wait();
        if (rank == 1) group->send(list, 0, 0)->wait();
      };
    case BenchVerb::barrier:
      return [=] { group->barrier()->wait(); };
  }
  return {};
}

}  // namespace

BenchCall::BenchCall(const CommBenchCase& what, int rank, int ranks, c10::Device device, Communicator* symmetric)
    : what_(what), rank_(rank), ranks_(ranks) {
  const auto options = at::TensorOptions(scalar_type_of(what.type)).device(device);
  const std::int64_t share = what.count / ranks;
  const auto zeros = [&](std::int64_t count) {
    return symmetric ? symmetric->symmetric_empty({count}, options).zero_() : at::zeros({count}, options);
  };
  buffers_.whole = zeros(what.count);
  buffers_.part = zeros(share);  // allocated on all ranks, even if not used
  const bool in_slice = what.place == Place::in &&
                        (!(what.verb == BenchVerb::gather || what.verb == BenchVerb::scatter) || rank == what.root);
  if (in_slice) buffers_.part = buffers_.whole.narrow(0, rank * share, share);
}

void BenchCall::use(Communicator& comm) {
  if (what_.place == Place::out) buffers_.received = at::zeros_like(buffers_.whole);
  const auto op = what_.op;
  const int root = what_.root;
  switch (what_.verb) {
    case BenchVerb::all_reduce:
      call_ = [this, &comm, op] { comm.all_reduce(buffers_.whole, {.op = op}); };
      return;
    case BenchVerb::all_gather:
      call_ = [this, &comm] { comm.all_gather(buffers_.whole, buffers_.part); };
      return;
    case BenchVerb::reduce_scatter:
      call_ = [this, &comm, op] { comm.reduce_scatter(buffers_.part, buffers_.whole, {.op = op}); };
      return;
    case BenchVerb::broadcast:
      call_ = [this, &comm, root] { comm.broadcast(buffers_.whole, {.root = root}); };
      return;
    case BenchVerb::reduce:
      call_ = [this, &comm, root, op] { comm.reduce(buffers_.whole, {.root = root, .op = op}); };
      return;
    case BenchVerb::gather:
      call_ = [this, &comm, root] {
        comm.gather(comm.rank() == root ? buffers_.whole : at::Tensor(), buffers_.part, {.root = root});
      };
      return;
    case BenchVerb::scatter:
      call_ = [this, &comm, root] {
        comm.scatter(buffers_.part, comm.rank() == root ? buffers_.whole : at::Tensor(), {.root = root});
      };
      return;
    case BenchVerb::all_to_all:
      call_ = [this, &comm] { comm.all_to_all(buffers_.received, buffers_.whole); };
      return;
    case BenchVerb::sendrecv:
      call_ = [this, &comm] {
        const int next = (rank_ + 1) % ranks_, before = (rank_ + ranks_ - 1) % ranks_;
        comm.batch_isend_irecv({{.is_send = true, .tensor = buffers_.whole, .peer = next},
                                {.is_send = false, .tensor = buffers_.received, .peer = before}});
      };
      return;
    case BenchVerb::pingpong:
      call_ = [this, &comm] {
        if (rank_ == 0) {
          comm.send(buffers_.whole, 1);
          comm.recv(buffers_.whole, 1);
        } else if (rank_ == 1) {
          comm.recv(buffers_.whole, 0);
          comm.send(buffers_.whole, 0);
        }
      };
      return;
    case BenchVerb::barrier:
      call_ = [&comm] { comm.barrier(); };
      return;
  }
}

BenchBaseline c10d_baseline(c10::intrusive_ptr<c10d::Backend> group) {
  return {"c10d", [group = std::move(group)](const CommBenchCase& what, int rank, int ranks, const BenchBuffers& b) {
            return c10d_call(group, what, rank, ranks, b);
          }};
}

void BenchCall::use(const BenchBaseline& peer) {
  if (what_.place == Place::out) buffers_.received = at::zeros_like(buffers_.whole);
  is_baseline_ = true;
  call_ = peer.make(what_, rank_, ranks_, buffers_);
}

void BenchCall::use_copy() {
  buffers_.received = at::zeros_like(buffers_.whole);
  if (buffers_.whole.is_cpu()) {
    call_ = [this] {
      std::memcpy(buffers_.received.mutable_data_ptr(), buffers_.whole.const_data_ptr(), buffers_.whole.nbytes());
    };
  } else {
    call_ = [this] { buffers_.received.copy_(buffers_.whole, /*non_blocking=*/true); };
  }
}

void BenchCall::run() const {
  call_();
  if (!buffers_.whole.is_cpu()) {
    const c10::impl::VirtualGuardImpl device(buffers_.whole.device().type());
    device.synchronizeDevice(buffers_.whole.device().index());
  }
}

std::int64_t BenchCall::check() {
  if (what_.verb == BenchVerb::barrier) {
    run();
    return 0;
  }
  const std::int64_t period = kPeriod * 55 * std::max(2, ranks_);
  const std::int64_t share = what_.count / ranks_;
  const auto from = [&](int rank) {
    return [this, rank](std::int64_t i) { return known_value(what_, rank, ranks_, i); };
  };
  const auto reduced = [this](std::int64_t i) { return known_result(what_, ranks_, i); };
  const at::Tensor mine = periodic(buffers_.whole, 0, period, from(rank_));
  const bool is_root = rank_ == what_.root;
  const int before = (rank_ + ranks_ - 1) % ranks_;

  // The input of this rank. For gathering verbs it is this rank's part of the values of the whole array.
  buffers_.whole.zero_();
  buffers_.part.zero_();
  if (buffers_.received.defined()) buffers_.received.zero_();
  const bool gathers = what_.verb == BenchVerb::all_gather || what_.verb == BenchVerb::gather;
  if (gathers) {
    buffers_.part.copy_(mine.narrow(0, 0, share));
  } else if (what_.verb == BenchVerb::pingpong
                 ? rank_ == 0
                 : is_root || (what_.verb != BenchVerb::broadcast && what_.verb != BenchVerb::scatter)) {
    buffers_.whole.copy_(mine);
  }
  run();

  std::int64_t wrong = 0;
  switch (what_.verb) {
    case BenchVerb::all_reduce:
      wrong = differing(buffers_.whole, periodic(buffers_.whole, 0, period, reduced));
      break;
    case BenchVerb::reduce:
      // Our backends do not change the tensors of the other ranks; other libraries may use them.
      if (is_root) wrong = differing(buffers_.whole, periodic(buffers_.whole, 0, period, reduced));
      if (!is_root && !is_baseline_) wrong = differing(buffers_.whole, mine);
      break;
    case BenchVerb::reduce_scatter:
      wrong = differing(buffers_.part, periodic(buffers_.part, rank_ * share, period, reduced));
      break;
    case BenchVerb::broadcast:
      wrong = differing(buffers_.whole, periodic(buffers_.whole, 0, period, from(what_.root)));
      break;
    case BenchVerb::all_gather:
    case BenchVerb::gather:
      for (int r = 0; r < ranks_ && (is_root || what_.verb == BenchVerb::all_gather); ++r) {
        const at::Tensor slice = buffers_.whole.narrow(0, r * share, share);
        wrong += differing(slice, periodic(slice, 0, period, from(r)));
      }
      break;
    case BenchVerb::scatter:
      wrong = differing(buffers_.part, periodic(buffers_.part, rank_ * share, period, from(what_.root)));
      break;
    case BenchVerb::all_to_all:
      for (int r = 0; r < ranks_; ++r) {
        const at::Tensor slice = buffers_.received.narrow(0, r * share, share);
        wrong += differing(slice, periodic(slice, rank_ * share, period, from(r)));
      }
      break;
    case BenchVerb::sendrecv:
      wrong = differing(buffers_.received, periodic(buffers_.received, 0, period, from(before)));
      break;
    case BenchVerb::pingpong:
      if (rank_ < 2) wrong = differing(buffers_.whole, periodic(buffers_.whole, 0, period, from(0)));
      break;
    case BenchVerb::barrier:
      break;
  }
  buffers_.whole.zero_();
  buffers_.part.zero_();
  return wrong;
}

}  // namespace phalanx::measure
