// Groups, byte objects, and the order of operations and of sums.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/suite_parts.h"

namespace phalanx {
namespace suite {
namespace {

// Values whose sums depend on order and rounding.
float awkward(int rank, std::int64_t i) {
  std::uint32_t bits = static_cast<std::uint32_t>(i) * 2654435761U + static_cast<std::uint32_t>(rank) * 40503U + 1;
  bits ^= bits >> 15;
  bits *= 2246822519U;
  bits ^= bits >> 13;
  return static_cast<float>(static_cast<std::int32_t>(bits)) * 1e-5F;
}
}  // namespace

namespace {

// All byte values, including NUL; different ones on every rank.
std::string object_of(int rank, std::int64_t length) {
  std::string bytes(static_cast<std::size_t>(length), '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<char>(i * 31 + i / 256 * 7 + static_cast<std::size_t>(rank) * 89);
  return bytes;
}

void check_bytes(Communicator& comm, const std::vector<std::int64_t>& lengths, int root) {
  const auto object = [&](int rank) { return object_of(rank, lengths[static_cast<std::size_t>(rank)]); };
  const auto require_object = [&](const std::string& found, int rank, const char* verb) {
    require(found == object(rank),
            fmt::format("{}, root {}: {} bytes instead of the {} of rank {}, or other ones", verb, root, found.size(),
                        lengths[static_cast<std::size_t>(rank)], rank));
  };
  const int me = comm.rank();
  const std::string mine = object(me);
  const std::vector<std::string> all = comm.all_gather_bytes(mine);
  require(all.size() == lengths.size(), "all_gather_bytes: size");
  for (int r = 0; r < comm.size(); ++r) require_object(all[static_cast<std::size_t>(r)], r, "all_gather_bytes");
  require_object(comm.broadcast_bytes(me == root ? mine : "not the root's", root), root, "broadcast_bytes");
  const std::vector<std::string> gathered = comm.gather_bytes(mine, root);
  require(gathered.size() == (me == root ? lengths.size() : 0), "gather_bytes: size");
  for (std::size_t r = 0; r < gathered.size(); ++r) require_object(gathered[r], static_cast<int>(r), "gather_bytes");
  std::vector<std::string> values;
  for (int r = 0; me == root && r < comm.size(); ++r) values.push_back(object(r));
  require_object(comm.scatter_bytes(values, root), me, "scatter_bytes");
}

}  // namespace

void suite_bytes(Communicator& comm) {
  const auto lengths = [&](auto length_of) {
    std::vector<std::int64_t> all;
    for (int r = 0; r < comm.size(); ++r) all.push_back(length_of(r));
    return all;
  };
  for (const int root : {0, comm.size() - 1}) {
    check_bytes(comm, lengths([](int r) { return r * 3; }), root);
    check_bytes(comm, lengths([](int) { return 0; }), root);
    check_bytes(comm, lengths([&](int r) { return r == root ? 0 : 5; }), root);
    check_bytes(comm, lengths([&](int r) { return r == root ? 5 : 0; }), root);
  }
  // Larger than a slot, a chunk, or the space beside a message's header.
  const std::int64_t large = suite_sizes(comm, {1 << 20}).back();
  check_bytes(comm, lengths([&](int r) { return large + r * 1001; }), comm.size() - 1);
}

void suite_split(Communicator& comm) {
  // Groups of odd and even ranks, in reverse order.
  auto half = comm.split(comm.rank() % 2, -comm.rank(), "half");
  const int size = (comm.size() + 1 - comm.rank() % 2) / 2;
  require(half->size() == size && half->rank() == size - 1 - comm.rank() / 2, "split: rank and size");
  at::Tensor sum = at::full({70'000}, comm.rank() * 1.0F);
  half->all_reduce(sum);
  float expected = 0;
  for (int r = comm.rank() % 2; r < comm.size(); r += 2) expected += static_cast<float>(r);
  require_equal(sum, at::full({70'000}, expected), "all_reduce of a half");
  // The last rank is in no group. The new group outlives the one that it was split from.
  auto most = comm.split(comm.rank() == comm.size() - 1 ? -1 : 0, comm.rank());
  require((most == nullptr) == (comm.rank() == comm.size() - 1), "split with a negative colour");
  auto nested = half->split(0, half->rank());
  half.reset();
  at::Tensor one = at::full({1}, 1.0F);
  nested->all_reduce(one);
  require_equal(one, at::full({1}, static_cast<float>(size)), "a group that outlives its parent");
  const auto on_host = comm.split_host("host");
  require(on_host->size() == comm.size() && on_host->rank() == comm.rank(), "split_host: rank and size");
  at::Tensor all = at::full({70'000}, 1.0F);
  on_host->all_reduce(all);
  require_equal(all, at::full({70'000}, static_cast<float>(comm.size())), "all_reduce of a host group");
  require(on_host->all_gather_bytes("x").size() == static_cast<std::size_t>(comm.size()), "bytes of a host group");
}

void suite_async(Communicator& comm) {
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int k = 0; k < 20; ++k) {
    tensors.push_back(at::full({k * 3000 + 1}, static_cast<float>(comm.rank() + k)));
    works.push_back(comm.all_reduce(tensors.back(), {.async = true}));
  }
  // A synchronous operation runs after them.
  at::Tensor last = at::full({3}, 1.0F);
  comm.all_reduce(last);
  for (const Work& work : works) require(work.is_done(), "operations complete in issue order");
  for (auto work = works.rbegin(); work != works.rend(); ++work) work->wait();
  const int n = comm.size();
  for (int k = 0; k < 20; ++k)
    require_equal(tensors[static_cast<std::size_t>(k)],
                  at::full({k * 3000 + 1}, static_cast<float>(n * (n - 1) / 2 + k * n)), fmt::format("async {}", k));
}

// Two ranks use two communicators in opposite order. This would deadlock if a call blocked.
void suite_opposite_order(Communicator& comm) {
  auto a = comm.split(0, comm.rank(), "a");
  auto b = comm.split(0, comm.rank(), "b");
  for (int round = 0; round < 5; ++round) {
    at::Tensor x = at::full({50'000}, 1.0F);
    at::Tensor y = at::full({50'000}, 2.0F);
    Communicator& first = comm.rank() % 2 == 0 ? *a : *b;
    Communicator& second = comm.rank() % 2 == 0 ? *b : *a;
    Work one = first.all_reduce(comm.rank() % 2 == 0 ? x : y, {.async = true});
    Work two = second.all_reduce(comm.rank() % 2 == 0 ? y : x, {.async = true});
    one.wait();
    two.wait();
    require_equal(x, at::full({50'000}, 1.0F * static_cast<float>(comm.size())), "communicator a");
    require_equal(y, at::full({50'000}, 2.0F * static_cast<float>(comm.size())), "communicator b");
  }
}

void suite_same_bits(Communicator& comm) {
  for (std::int64_t count : suite_sizes(comm, {777, 300'011})) {
    at::Tensor x = make_tensor(count, ScalarType::Float, [&](std::int64_t i) { return awkward(comm.rank(), i); });
    comm.all_reduce(x, {.op = ReduceOp::avg});
    at::Tensor all = at::empty({count * comm.size()});
    comm.all_gather(all, x);
    for (int r = 0; r < comm.size(); ++r)
      require(std::memcmp(all.narrow(0, r * count, count).const_data_ptr(), x.const_data_ptr(), x.nbytes()) == 0,
              fmt::format("rank {} has other bits than rank {}", r, comm.rank()));
  }
}

void suite_rank_order(Communicator& comm) {
  for (std::int64_t count : suite_sizes(comm, {777, 300'011})) {
    at::Tensor x = make_tensor(count, ScalarType::Float, [&](std::int64_t i) { return awkward(comm.rank(), i); });
    at::Tensor h = x.to(ScalarType::BFloat16);
    comm.all_reduce(x);
    comm.all_reduce(h);
    const at::Tensor rounded = h.to(ScalarType::Float);
    for (std::int64_t i = 0; i < count; ++i) {
      float sum = awkward(0, i);
      for (int r = 1; r < comm.size(); ++r) sum += awkward(r, i);
      require(x.const_data_ptr<float>()[i] == sum, fmt::format("element {} is not the sum in rank order", i));
    }
    const at::Tensor expected = [&] {
      at::Tensor sum = make_tensor(count, ScalarType::Float, [&](std::int64_t i) { return awkward(0, i); })
                           .to(ScalarType::BFloat16)
                           .to(ScalarType::Float);
      for (int r = 1; r < comm.size(); ++r)
        sum += make_tensor(count, ScalarType::Float, [&](std::int64_t i) { return awkward(r, i); })
                   .to(ScalarType::BFloat16)
                   .to(ScalarType::Float);
      return sum.to(ScalarType::BFloat16).to(ScalarType::Float);
    }();
    require_equal(rounded, expected, "bfloat16 accumulated in float32, rounded once");
  }
}

void suite_soak(Communicator& comm) {
  at::Tensor x = at::full({64}, 1.0F);
  at::Tensor all = at::empty({64 * comm.size()});
  for (int k = 0; k < (is_small_world(comm) && !is_slow(comm) ? 400 : 60); ++k) {
    x.fill_(static_cast<float>(k));
    comm.all_reduce(x);
    comm.broadcast(x, {.root = k % comm.size()});
    comm.all_gather(all, x);
    if (k % 7 == 0) comm.barrier();
    require(all.const_data_ptr<float>()[64 * comm.size() - 1] == static_cast<float>(k * comm.size()), "soak");
  }
}
}  // namespace suite

void suite_async_soak(Communicator& comm) {
  constexpr int kOperations = 10'000;
  constexpr int kInFlight = 64;
  auto a = comm.split(0, comm.rank(), "soak a");
  auto b = comm.split(0, comm.rank(), "soak b");
  struct Slot {
    at::Tensor tensor;
    Work work;
    float expected = 0;
  };
  std::array<Slot, kInFlight> slots;
  for (std::size_t k = 0; k < kInFlight; ++k) slots[k].tensor = at::empty({static_cast<std::int64_t>(1 + k % 17)});
  const auto settle = [](Slot& slot) {
    slot.work.wait();
    const auto* data = slot.tensor.const_data_ptr<float>();
    for (std::int64_t i = 0; i < slot.tensor.numel(); ++i) suite::require(data[i] == slot.expected, "async soak");
  };
  for (int k = 0; k < kOperations; k += 2) {
    for (int which = 0; which < 2; ++which) {
      // The order of the pair depends on the rank.
      const int operation = k + (comm.rank() + which) % 2;
      Slot& slot = slots[static_cast<std::size_t>(operation % kInFlight)];
      if (operation >= kInFlight) settle(slot);
      Communicator& group = operation % 2 == 0 ? *a : *b;
      auto* data = slot.tensor.mutable_data_ptr<float>();
      std::fill_n(data, slot.tensor.numel(), static_cast<float>(operation % 1000 + comm.rank()));
      if (operation % 3 == 0) {
        const int root = operation % comm.size();
        slot.expected = static_cast<float>(operation % 1000 + root);
        slot.work = group.broadcast(slot.tensor, {.root = root, .async = true});
      } else {
        slot.expected = static_cast<float>(comm.size() * (operation % 1000) + comm.size() * (comm.size() - 1) / 2);
        slot.work = group.all_reduce(slot.tensor, {.async = true});
      }
    }
  }
  for (Slot& slot : slots) settle(slot);
}

}  // namespace phalanx
