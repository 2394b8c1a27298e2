// The shm backend with payloads larger than the caches: many pieces for every verb, streamed results, and the bits of a
// sum in rank order.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/stream_copy.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

// Large enough to be streamed, no multiple of a piece or of a cache line, and divisible by 2, 3, 4 and 8 ranks.
constexpr std::int64_t kLarge = 24 * 90'013;
static_assert(kLarge * sizeof(float) > kStreamBytes);

// Sums of these round: their bits depend on the order.
float large_value(int rank, std::int64_t i) {
  static const std::array<float, 1024> values = [] {
    std::array<float, 1024> made{};
    for (std::size_t k = 0; k < made.size(); ++k) made[k] = 1.0F / static_cast<float>(k + 1);
    return made;
  }();
  // The period is no multiple of a piece or of a part.
  return values[(static_cast<std::size_t>(i) + static_cast<std::size_t>(i) / 1000 +
                 static_cast<std::size_t>(rank) * 57) %
                values.size()];
}

using LargeValue = std::function<float(std::int64_t)>;

// Begins 4 bytes after a cache line boundary.
at::Tensor large_empty(std::int64_t count) { return at::empty({count + 1}).narrow(0, 1, count); }

at::Tensor large_tensor(std::int64_t count, int rank, std::int64_t first = 0) {
  at::Tensor tensor = large_empty(count);
  auto* data = tensor.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < count; ++i) data[i] = large_value(rank, first + i);
  return tensor;
}

void require_large(const char* what, const at::Tensor& found, std::int64_t begin, std::int64_t count,
                   const LargeValue& expected) {
  const auto* data = found.const_data_ptr<float>() + begin;
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = expected(i);
    if (std::memcmp(&data[i], &value, sizeof value) != 0)
      throw std::runtime_error(fmt::format("{}: element {} is {}, expected {}", what, begin + i, data[i], value));
  }
}

float sum_in_rank_order(int world, std::int64_t i) {
  float sum = large_value(0, i);
  for (int r = 1; r < world; ++r) sum += large_value(r, i);
  return sum;
}

// kLarge elements in total; the last rank has none, the first the most.
std::vector<std::int64_t> uneven_parts(int world) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(world), kLarge / (2 * world) + 1);
  if (world > 1) counts.back() = 0;
  counts.front() = kLarge - std::accumulate(counts.begin() + 1, counts.end(), std::int64_t{0});
  return counts;
}

void large_gathers(Communicator& comm) {
  const int me = comm.rank();
  const std::int64_t part = kLarge / comm.size();
  const auto require_all = [&](const char* what, const at::Tensor& whole) {
    for (int r = 0; r < comm.size(); ++r)
      require_large(what, whole, r * part, part, [r](std::int64_t i) { return large_value(r, i); });
  };
  at::Tensor whole = large_empty(kLarge);
  const at::Tensor mine = large_tensor(part, me);
  comm.all_gather(whole, mine);
  require_all("all_gather", whole);

  whole.zero_();
  at::Tensor slice = whole.narrow(0, me * part, part);
  slice.copy_(mine);
  comm.all_gather(whole, slice);
  require_all("all_gather in place", whole);

  const std::vector<std::int64_t> counts = uneven_parts(comm.size());
  whole.zero_();
  comm.all_gather_uneven(whole, large_tensor(counts[static_cast<std::size_t>(me)], me), counts);
  std::int64_t begin = 0;
  for (int r = 0; r < comm.size(); ++r) {
    const std::int64_t count = counts[static_cast<std::size_t>(r)];
    require_large("uneven all_gather", whole, begin, count, [r](std::int64_t i) { return large_value(r, i); });
    begin += count;
  }

  const int root = comm.size() - 1;
  if (me == root) whole.zero_();
  comm.gather(me == root ? whole : at::Tensor(), mine, {.root = root});
  if (me == root) require_all("gather", whole);

  // A different part for each rank, each of the full size.
  const at::Tensor source = me == root ? large_tensor(kLarge * comm.size(), 1) : at::Tensor();
  comm.scatter(whole, source, {.root = root});
  require_large("scatter", whole, 0, kLarge, [&](std::int64_t i) { return large_value(1, me * kLarge + i); });

  whole = me == root ? large_tensor(kLarge, 5) : whole;
  comm.broadcast(whole, {.root = root});
  require_large("broadcast", whole, 0, kLarge, [](std::int64_t i) { return large_value(5, i); });
}

void large_exchanges(Communicator& comm) {
  const int me = comm.rank();
  const int world = comm.size();
  const std::int64_t part = kLarge / world;
  const at::Tensor mine = large_tensor(kLarge, me);
  at::Tensor received = large_empty(kLarge);
  comm.all_to_all(received, mine);
  for (int r = 0; r < world; ++r)
    require_large("all_to_all", received, r * part, part,
                  [&](std::int64_t i) { return large_value(r, me * part + i); });

  // Rank i sends (i + j) % world parts to rank j.
  const auto between = [&](int i, int j) { return (i + j) % world * (kLarge / world); };
  std::vector<std::int64_t> out;
  std::vector<std::int64_t> in;
  for (int r = 0; r < world; ++r) {
    out.push_back(between(me, r));
    in.push_back(between(r, me));
  }
  const auto total = [](const std::vector<std::int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  };
  received = large_empty(total(in));
  comm.all_to_all_uneven(received, large_tensor(total(out), me), in, out);
  std::int64_t at = 0;
  for (int r = 0; r < world; ++r) {
    std::int64_t first = 0;  // of what rank r sends here
    for (int j = 0; j < me; ++j) first += between(r, j);
    require_large("uneven all_to_all", received, at, between(r, me),
                  [&](std::int64_t i) { return large_value(r, first + i); });
    at += between(r, me);
  }

  if (me < 2 && world > 1) {
    received = large_empty(kLarge);
    comm.batch_isend_irecv({{true, mine, 1 - me, 3}, {false, received, 1 - me, 3}});
    require_large("messages", received, 0, kLarge, [&](std::int64_t i) { return large_value(1 - me, i); });
  }
}

void large_reductions(Communicator& comm) {
  const int me = comm.rank();
  const int world = comm.size();
  // A part of the full size, so that it is streamed.
  const at::Tensor input = large_tensor(kLarge * world, me);
  at::Tensor part = large_empty(kLarge);
  comm.reduce_scatter(part, input);
  const LargeValue own_sum = [&](std::int64_t i) { return sum_in_rank_order(world, me * kLarge + i); };
  require_large("reduce_scatter", part, 0, kLarge, own_sum);

  at::Tensor slice = input.narrow(0, me * kLarge, kLarge);
  comm.reduce_scatter(slice, input);
  require_large("reduce_scatter in place", slice, 0, kLarge, own_sum);

  std::vector<std::int64_t> counts = uneven_parts(world);
  part = large_empty(counts[static_cast<std::size_t>(me)]);
  comm.reduce_scatter_uneven(part, large_tensor(kLarge, me), counts);
  const std::int64_t begin = std::accumulate(counts.begin(), counts.begin() + me, std::int64_t{0});
  require_large("uneven reduce_scatter", part, 0, part.numel(),
                [&](std::int64_t i) { return sum_in_rank_order(world, begin + i); });

  at::Tensor x = large_tensor(kLarge, me);
  comm.all_reduce(x);
  require_large("all_reduce", x, 0, kLarge, [&](std::int64_t i) { return sum_in_rank_order(world, i); });
}

class ShmLarge : public ::testing::TestWithParam<int> {};

TEST_P(ShmLarge, EveryVerbMovesWhatLeavesTheCaches) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks_or_threads(GetParam(),
                                        [&](int rank) {
                                          TcpStore store(server.address());
                                          const auto comm = make_shm_communicator(store, rank, GetParam());
                                          large_gathers(*comm);
                                          large_exchanges(*comm);
                                          large_reductions(*comm);
                                        }),
            "");
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmLarge, ::testing::Values(2, 3, 4, 8));

}  // namespace
}  // namespace phalanx
