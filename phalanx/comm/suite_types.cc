// Every verb with every type and, where it reduces, every operation.
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include "phalanx/comm/suite_parts.h"

namespace phalanx::suite {
namespace {

// What rank `from` has for rank `to`: exact in every type.
at::Tensor part_for(int from, int to, std::int64_t count, ScalarType type) {
  return make_tensor(count, type, [&](std::int64_t i) {
    const std::int64_t value = from * 5 + to * 2 + i;
    return type == ScalarType::Bool ? value / 2 % 2 : value % 120;
  });
}

// The parts of all ranks, one after the other; part(rank) is a tensor.
template <class Part>
at::Tensor parts_of(const Communicator& comm, Part part) {
  std::vector<at::Tensor> parts;
  for (int r = 0; r < comm.size(); ++r) parts.push_back(part(r));
  return at::cat(parts);
}

void suite_every_type_moved(Communicator& comm, ScalarType type, std::int64_t count) {
  const int n = comm.size();
  const int me = comm.rank();
  const int root = n - 1;
  const auto require_moved = [&](const at::Tensor& found, const at::Tensor& expected, const char* verb) {
    require_equal(found, expected, fmt::format("{} {} [{}]", verb, c10::toString(type), count));
  };
  const auto blank = [](const at::Tensor& like) { return at::full(like.sizes(), 0, like.options()); };
  const at::Tensor mine = part_for(me, 0, count, type);
  const at::Tensor all = parts_of(comm, [&](int r) { return part_for(r, 0, count, type); });

  at::Tensor x = mine.clone();
  comm.broadcast(x, {.root = root});
  require_moved(x, part_for(root, 0, count, type), "broadcast");
  at::Tensor gathered = blank(all);
  comm.all_gather(gathered, mine);
  require_moved(gathered, all, "all_gather");
  gathered = me == root ? blank(all) : at::Tensor();
  comm.gather(gathered, mine, {.root = root});
  if (me == root) require_moved(gathered, all, "gather");
  at::Tensor part = blank(mine);
  comm.scatter(part, me == root ? all : at::Tensor(), {.root = root});
  require_moved(part, mine, "scatter");

  const auto to_all = [&](int r) { return part_for(me, r, count, type); };
  const auto from_all = [&](int r) { return part_for(r, me, count, type); };
  at::Tensor exchanged = blank(all);
  comm.all_to_all(exchanged, parts_of(comm, to_all));
  require_moved(exchanged, parts_of(comm, from_all), "all_to_all");

  // Some pairs, and some ranks, have nothing for each other.
  const auto pair_count = [&](int from, int to) { return (from + 2 * to) % 3 * count; };
  std::vector<std::int64_t> counts;
  std::vector<std::int64_t> sends;
  std::vector<std::int64_t> receives;
  for (int r = 0; r < n; ++r) {
    counts.push_back(r % 3 == 1 ? 0 : count + r);
    sends.push_back(pair_count(me, r));
    receives.push_back(pair_count(r, me));
  }
  const at::Tensor uneven =
      parts_of(comm, [&](int r) { return part_for(r, 0, counts[static_cast<std::size_t>(r)], type); });
  gathered = blank(uneven);
  comm.all_gather_uneven(gathered, part_for(me, 0, counts[static_cast<std::size_t>(me)], type), counts);
  require_moved(gathered, uneven, "all_gather_uneven");
  const at::Tensor expected = parts_of(comm, [&](int r) { return part_for(r, me, pair_count(r, me), type); });
  exchanged = blank(expected);
  comm.all_to_all_uneven(exchanged, parts_of(comm, [&](int r) { return part_for(me, r, pair_count(me, r), type); }),
                         receives, sends);
  require_moved(exchanged, expected, "all_to_all_uneven");

  const int before = (me + n - 1) % n;
  at::Tensor received = blank(mine);
  comm.batch_peer_to_peer({{false, received, before, 1}, {true, mine, (me + 1) % n, 1}});
  require_moved(received, part_for(before, 0, count, type), "batch_peer_to_peer");
  const int peer = me ^ 1;
  if (peer >= n) return;
  if (me % 2 == 0) {
    comm.send(mine, peer);
  } else {
    received.zero_();
    comm.recv(received, peer);
    require_moved(received, part_for(peer, 0, count, type), "send and recv");
  }
}

void suite_every_type_reduced(Communicator& comm, ScalarType type, ReduceOp op, std::int64_t count) {
  const int n = comm.size();
  const int me = comm.rank();
  const int root = n - 1;
  const auto mine = [&](std::int64_t size) {
    return make_tensor(size, type, [&](std::int64_t i) { return suite_value(op, type, me, i); });
  };
  const auto result = [&](std::int64_t begin, std::int64_t size) {
    return make_tensor(size, type, [&](std::int64_t i) { return suite_result(op, type, n, begin + i); });
  };
  at::Tensor x = mine(count);
  comm.all_reduce(x, {.op = op});
  require_equal(x, result(0, count), label("all_reduce", type, op, count));
  x = mine(count);
  comm.reduce(x, {.root = root, .op = op});
  require_equal(x, me == root ? result(0, count) : mine(count), label("reduce", type, op, count));
  at::Tensor out = at::full({count}, 0, x.options());
  comm.reduce_scatter(out, mine(count * n), {.op = op});
  require_equal(out, result(me * count, count), label("reduce_scatter", type, op, count));
  std::vector<std::int64_t> counts;
  for (int r = 0; r < n; ++r) counts.push_back(r % 3 == 1 ? 0 : count + r);
  const std::int64_t own = counts[static_cast<std::size_t>(me)];
  out = at::full({own}, 0, x.options());
  comm.reduce_scatter_uneven(out, mine(total_of(counts)), counts, {.op = op});
  require_equal(out, result(begin_of(counts, me), own), label("reduce_scatter_uneven", type, op, count));
}
}  // namespace

// Small; the other cases have the sizes.
void suite_every_type(Communicator& comm) {
  for (const std::int64_t count : {0, 1, 129}) {
    for (const ScalarType type : kTypes) suite_every_type_moved(comm, type, count);
    for_each_reduction([&](ScalarType type, ReduceOp op) { suite_every_type_reduced(comm, type, op, count); });
  }
}

}  // namespace phalanx::suite
