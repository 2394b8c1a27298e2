// Products that overlap with the exchange of rows: compared with gathering, the whole product and scattering one after
// the other. Also checks that they do overlap.
#include "phalanx/parallel/tensor/overlapped_layers.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/swiglu_feed_forward.h"
#include "phalanx/parallel/tensor/chunked_collectives.h"
#include "phalanx/parallel/tensor/functional_collectives.h"
#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx {
namespace {

using OverlapComm = std::shared_ptr<Communicator>;
using OverlapTensors = std::vector<at::Tensor>;

constexpr std::int64_t kOverlapDim = 6, kOverlapHidden = 5;

at::Tensor overlap_values(at::IntArrayRef sizes, double factor) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::sin(at::arange(count, at::kFloat).mul(factor)).view(sizes);
}

// x and the weights of a rank, whose weights differ from the others'.
struct OverlapCase {
  explicit OverlapCase(const OverlapComm& comm, std::int64_t dim, at::ScalarType dtype = at::kFloat) {
    const std::int64_t ranks = comm->size();
    whole = overlap_values({ranks * 2, ranks * 3, kOverlapDim}, 0.37).to(dtype);
    x = scatter_to_group(whole, dim, comm).requires_grad_();
    const auto weight = [&](std::int64_t out, std::int64_t in, double factor) {
      return overlap_values({out, in}, factor + comm->rank()).to(dtype).requires_grad_();
    };
    inner = {weight(kOverlapHidden, kOverlapDim, 0.7), weight(3, kOverlapDim, 1.3), weight(2, kOverlapDim, 1.9)};
    up = weight(kOverlapHidden, kOverlapDim, 0.9);
    last = weight(kOverlapDim, kOverlapHidden, 1.1);
  }
  at::Tensor whole, x, up, last;
  OverlapTensors inner;
};

// Outputs, and the gradients of x and all weights for a loss in which every element has a different weight.
OverlapTensors overlap_outcome(OverlapCase& c, const std::function<OverlapTensors(const at::Tensor& x)>& net) {
  OverlapTensors result;
  at::Tensor loss = at::zeros({});
  for (const at::Tensor& y : net(c.x)) {
    result.push_back(y.detach());
    loss = loss + (y.to(at::kFloat) * overlap_values(y.sizes(), 0.53)).sum();
  }
  loss.backward();
  OverlapTensors leaves = {c.x, c.up, c.last};
  leaves.insert(leaves.end(), c.inner.begin(), c.inner.end());
  for (at::Tensor& leaf : leaves) {
    if (!leaf.grad().defined()) continue;
    result.push_back(leaf.grad().clone());
    leaf.mutable_grad().reset();
  }
  return result;
}

void expect_same_outcome(const OverlapTensors& found, const OverlapTensors& expected, double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::allclose(found[i], expected[i], tolerance, tolerance)) << i;
  }
}

void expect_all_equal_their_parts(int ranks, std::int64_t dim, at::ScalarType dtype, double tolerance) {
  SCOPED_TRACE(::testing::Message() << ranks << " ranks, dimension " << dim << ", " << c10::toString(dtype));
  run_local_ranks(ranks, [&](const OverlapComm& comm) {
    OverlapCase c(comm, dim, dtype);
    const auto exchange = overlapped_collective_matmul(comm, dim);
    const auto gathered = [&](const at::Tensor& x) { return all_gather_along(x, dim, comm); };
    const auto scattered = [&](const at::Tensor& y) { return reduce_scatter_along(y, dim, comm); };
    expect_same_outcome(
        overlap_outcome(c, [&](const at::Tensor& x) { return exchange->all_gather_matmul(x, c.inner); }),
        overlap_outcome(c,
                        [&](const at::Tensor& x) {
                          const at::Tensor all = gathered(x);
                          OverlapTensors ys;
                          for (const auto& w : c.inner) ys.push_back(kernels::linear(all, w));
                          return ys;
                        }),
        tolerance);
    expect_same_outcome(overlap_outcome(c,
                                        [&](const at::Tensor& x) {
                                          const at::Tensor h = exchange->all_gather_matmul(x, {c.up})[0];
                                          return OverlapTensors{exchange->matmul_reduce_scatter(h * h, c.last)};
                                        }),
                        overlap_outcome(c,
                                        [&](const at::Tensor& x) {
                                          const at::Tensor h = kernels::linear(gathered(x), c.up);
                                          return OverlapTensors{scattered(kernels::linear(h * h, c.last))};
                                        }),
                        tolerance);
    expect_same_outcome(overlap_outcome(c,
                                        [&](const at::Tensor& x) {
                                          return OverlapTensors{exchange->feed_forward(x, c.inner[0], c.last, c.up)};
                                        }),
                        overlap_outcome(c,
                                        [&](const at::Tensor& x) {
                                          return OverlapTensors{scattered(
                                              kernels::swiglu_feed_forward(gathered(x), c.inner[0], c.last, c.up))};
                                        }),
                        tolerance);
  });
}

TEST(OverlappedLayers, EqualExchangesAroundWholeProducts) {
  for (const int ranks : {2, 3, 4}) {
    for (const std::int64_t dim : {0, 1}) expect_all_equal_their_parts(ranks, dim, at::kFloat, 1e-5);
  }
  expect_all_equal_their_parts(2, 1, at::kDouble, 1e-12);
  expect_all_equal_their_parts(3, 0, at::kBFloat16, 4e-2);
}

// Rows so small that a product has the same bits whether computed whole or in chunks.
TEST(OverlappedLayers, MoveTheSameBitsAsCollectives) {
  for (const int ranks : {2, 3, 4}) {
    for (const std::int64_t dim : {0, 1}) {
      run_local_ranks(ranks, [&](const OverlapComm& comm) {
        const OverlapCase c(comm, dim);
        ChunkedAllGather x(c.x, dim, *comm);
        for (const RowChunk& chunk : x.chunks()) {
          EXPECT_TRUE(at::equal(x.wait(chunk), c.whole.view({-1, kOverlapDim}).narrow(0, chunk.first, chunk.count)));
        }
        EXPECT_TRUE(at::equal(x.rows().view(c.whole.sizes()), c.whole));
        const at::Tensor addends = c.whole * (comm->rank() + 0.3);
        ChunkedReduceScatter y(RowLayout::of_whole(addends.sizes(), dim, *comm), addends.options(), *comm);
        std::int64_t rows = 0;
        for (const RowChunk& chunk : y.chunks()) {
          y.buffer(chunk).copy_(addends.view({-1, kOverlapDim}).narrow(0, chunk.first, chunk.count));
          y.send(chunk);
          rows += chunk.count;
        }
        EXPECT_EQ(rows, addends.numel() / kOverlapDim);
        EXPECT_TRUE(at::equal(y.finish(), reduce_scatter_along(addends, dim, comm)));
      });
    }
  }
}

// Rank 1 starts only when rank 0 reports that it has done what it can do alone. If that were nothing, both would wait.
TEST(OverlappedLayers, ARankMultipliesItsOwnRowsAndSendsTheOthersWithoutWaiting) {
  run_local_ranks(2,
                  [](const OverlapComm& comm) {
                    const auto aside = comm->split(0, comm->rank(), "aside");
                    const at::Tensor flag = at::zeros({1});
                    const at::Tensor part = overlap_values({2, 3}, 0.3 + comm->rank());
                    const bool is_first = comm->rank() == 0;
                    if (!is_first) aside->recv(flag, 0);
                    ChunkedAllGather x(part, 0, *comm);
                    EXPECT_TRUE(at::equal(x.wait(x.chunks()[0]), part));
                    if (is_first) aside->send(flag, 1);
                    for (const RowChunk& chunk : x.chunks()) x.wait(chunk);
                    if (!is_first) aside->recv(flag, 0);
                    ChunkedReduceScatter y(x.layout(), part.options(), *comm);
                    for (const RowChunk& chunk : y.chunks()) {
                      y.buffer(chunk).copy_(x.rows().narrow(0, chunk.first, chunk.count));
                      y.send(chunk);
                    }
                    if (is_first) aside->send(flag, 1);
                    EXPECT_TRUE(at::equal(y.finish(), part * 2));
                  },
                  {.first_timeout = std::chrono::seconds(60)});
}

// In chunks along the outer dimension, a rank is some chunks ahead: all its sends are in flight before any has arrived.
TEST(OverlappedLayers, BlocksAreSentBeforeAnyHasArrived) {
  run_local_ranks(2,
                  [](const OverlapComm& comm) {
                    const auto aside = comm->split(0, comm->rank(), "aside");
                    const at::Tensor flag = at::zeros({1});
                    if (comm->rank() == 1) aside->recv(flag, 0);
                    ChunkedReduceScatter y(RowLayout::of_whole({3, 4, 2}, 1, *comm), at::kFloat, *comm);
                    EXPECT_EQ(y.chunks().size(), 3);
                    for (const RowChunk& chunk : y.chunks()) {
                      y.buffer(chunk).fill_(comm->rank() + 1);
                      y.send(chunk);
                    }
                    if (comm->rank() == 0) aside->send(flag, 1);
                    EXPECT_TRUE(at::equal(y.finish(), at::zeros({3, 2, 2}).fill_(3)));
                  },
                  {.first_timeout = std::chrono::seconds(60)});
}

TEST(OverlappedLayers, LeaveWeightGradientsInAQueueAroundThem) {
  run_local_ranks(2, [](const OverlapComm& comm) {
    OverlapCase c(comm, 0);
    const auto exchange = overlapped_collective_matmul(comm, 0);
    const auto net = [&] {
      const at::Tensor h = exchange->all_gather_matmul(c.x, {c.up})[0];
      return exchange->matmul_reduce_scatter(h, c.last).sum() +
             exchange->feed_forward(c.x, c.inner[0], c.last, c.up).square().sum();
    };
    net().backward();
    const OverlapTensors weights = {c.up, c.last, c.inner[0]};
    OverlapTensors expected;
    for (const at::Tensor& weight : weights) {
      expected.push_back(weight.grad().clone());
      weight.mutable_grad().reset();
    }
    const auto queue = std::make_shared<WeightGradientQueue>();
    at::Tensor loss;
    {
      const WeightGradientQueue::Scope scope(queue, {.micro_batch = 2});
      loss = net();
    }
    loss.backward();
    for (const at::Tensor& weight : weights) EXPECT_FALSE(weight.grad().defined());
    EXPECT_EQ(queue->size({.micro_batch = 2}), 5);
    queue->flush({.micro_batch = 2});
    for (std::size_t i = 0; i < weights.size(); ++i) {
      EXPECT_TRUE(at::allclose(weights[i].grad(), expected[i], 1e-5, 1e-5)) << i;
    }
  });
}

TEST(OverlappedLayers, UnderAutocastActivationsTravelInItsType) {
  run_local_ranks(2, [](const OverlapComm& comm) {
    OverlapCase c(comm, 1);
    const auto exchange = overlapped_collective_matmul(comm, 1);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const at::Tensor h = exchange->all_gather_matmul(c.x, {c.up})[0], y = exchange->matmul_reduce_scatter(h, c.last);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    EXPECT_EQ(h.scalar_type(), at::kBFloat16);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.sum().backward();
    EXPECT_EQ(c.x.grad().scalar_type(), at::kFloat);
    const at::Tensor grad = c.up.grad().clone();
    c.up.mutable_grad().reset();
    exchange->matmul_reduce_scatter(exchange->all_gather_matmul(c.x, {c.up})[0], c.last).sum().backward();
    EXPECT_TRUE(at::allclose(grad, c.up.grad(), 5e-2, 5e-2));
  });
}

TEST(OverlappedLayersErrors, SayWhatIsExpected) {
  run_local_ranks(2, [](const OverlapComm& comm) {
    OverlapCase c(comm, 0);
    const auto exchange = overlapped_collective_matmul(comm, 2);
    EXPECT_THAT(error_text([&] { exchange->all_gather_matmul(c.x, {c.up}); }),
                HasSubstr("along dimension 2: expected one before the last, 0 to 1"));
    const at::Tensor h = overlap_values({3, 4, kOverlapHidden}, 0.2);
    EXPECT_THAT(error_text([&] { overlapped_collective_matmul(comm, 0)->matmul_reduce_scatter(h, c.last); }),
                HasSubstr("dimension 0 of [3, 4, 5] cannot be split over the 2 ranks of"));
    const at::Tensor y = overlapped_collective_matmul(comm, 0)->all_gather_matmul(c.x, {c.up})[0];
    EXPECT_THAT(
        error_text([&] { torch::autograd::grad({y.sum()}, {c.x}, {}, /*retain_graph=*/true, /*create_graph=*/true); }),
        HasSubstr("differentiable once; expected .overlap = false in the plan"));
  });
}

}  // namespace
}  // namespace phalanx
