// Every verb with every type and, for reductions, every operation: one after the other, and all asynchronously at once.
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phalanx/comm/testing/suite_parts.h"

namespace phalanx::suite {
namespace {

// The results of a case's calls. They are checked after each call. Asynchronous calls are all started first, and
// checked from the last to the first.
class Checks {
 public:
  explicit Checks(bool async) : async_(async) {}
  bool async() const { return async_; }
  void add(Work work, const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
    calls_.push_back({std::move(work), found, expected, what});
    if (!async_) finish();
  }
  void finish() {
    for (; !calls_.empty(); calls_.pop_back()) {
      const Call& call = calls_.back();
      call.work.wait();
      if (call.found.defined()) require_equal(call.found, call.expected, (async_ ? "asynchronous " : "") + call.what);
    }
  }

 private:
  struct Call {
    Work work;
    at::Tensor found, expected;  // undefined: this rank gets no output
    std::string what;
  };
  bool async_;
  std::vector<Call> calls_;
};

at::Tensor blank_like(const at::Tensor& like) { return at::full(like.sizes(), 0, like.options()); }

void suite_every_type_moved(Communicator& comm, ScalarType type, std::int64_t count, Checks& checks) {
  const int n = comm.size();
  const int me = comm.rank();
  const int root = n - 1;
  const bool async = checks.async();
  const auto check = [&](Work work, const at::Tensor& found, const at::Tensor& expected, const char* verb) {
    checks.add(std::move(work), found, expected, fmt::format("{} {} [{}]", verb, c10::toString(type), count));
  };
  const at::Tensor mine = part_for(me, 0, count, type);
  const at::Tensor all = parts_of(comm, [&](int r) { return part_for(r, 0, count, type); });

  at::Tensor out = mine.clone();
  check(comm.broadcast(out, {.root = root, .async = async}), out, part_for(root, 0, count, type), "broadcast");
  out = blank_like(all);
  check(comm.all_gather(out, mine, {.async = async}), out, all, "all_gather");
  out = me == root ? blank_like(all) : at::Tensor();
  check(comm.gather(out, mine, {.root = root, .async = async}), out, all, "gather");
  out = blank_like(mine);
  check(comm.scatter(out, me == root ? all : at::Tensor(), {.root = root, .async = async}), out, mine, "scatter");

  const auto to_all = [&](int r) { return part_for(me, r, count, type); };
  const auto from_all = [&](int r) { return part_for(r, me, count, type); };
  out = blank_like(all);
  check(comm.all_to_all(out, parts_of(comm, to_all), {.async = async}), out, parts_of(comm, from_all), "all_to_all");

  // Some pairs of ranks, and some ranks, have no data to exchange.
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
  out = blank_like(uneven);
  check(comm.all_gather_uneven(out, part_for(me, 0, counts[static_cast<std::size_t>(me)], type), counts,
                               {.async = async}),
        out, uneven, "all_gather_uneven");
  const at::Tensor expected = parts_of(comm, [&](int r) { return part_for(r, me, pair_count(r, me), type); });
  out = blank_like(expected);
  check(comm.all_to_all_uneven(out, parts_of(comm, [&](int r) { return part_for(me, r, pair_count(me, r), type); }),
                               receives, sends, {.async = async}),
        out, expected, "all_to_all_uneven");

  const int before = (me + n - 1) % n;
  out = blank_like(mine);
  check(comm.batch_isend_irecv({{false, out, before, 1}, {true, mine, (me + 1) % n, 1}}, {.async = async}), out,
        part_for(before, 0, count, type), "batch_isend_irecv");
  const int peer = me ^ 1;
  if (peer >= n) return;
  out = me % 2 == 0 ? at::Tensor() : blank_like(mine);
  check(me % 2 == 0 ? comm.send(mine, peer, {.async = async}) : comm.recv(out, peer, {.async = async}), out,
        part_for(peer, 0, count, type), "send and recv");
}

void suite_every_type_reduced(Communicator& comm, ScalarType type, ReduceOp op, std::int64_t count, Checks& checks) {
  const int n = comm.size();
  const int me = comm.rank();
  const int root = n - 1;
  const bool async = checks.async();
  const auto check = [&](Work work, const at::Tensor& found, const at::Tensor& expected, const char* verb) {
    checks.add(std::move(work), found, expected, label(verb, type, op, count));
  };
  const auto mine = [&](std::int64_t size) {
    return make_tensor(size, type, [&](std::int64_t i) { return suite_value(op, type, me, i); });
  };
  const auto result = [&](std::int64_t begin, std::int64_t size) {
    return make_tensor(size, type, [&](std::int64_t i) { return suite_result(op, type, n, begin + i); });
  };
  at::Tensor out = mine(count);
  check(comm.all_reduce(out, {.op = op, .async = async}), out, result(0, count), "all_reduce");
  out = mine(count);
  check(comm.reduce(out, {.root = root, .op = op, .async = async}), out, me == root ? result(0, count) : mine(count),
        "reduce");
  out = at::full({count}, 0, out.options());
  check(comm.reduce_scatter(out, mine(count * n), {.op = op, .async = async}), out, result(me * count, count),
        "reduce_scatter");
  std::vector<std::int64_t> counts;
  for (int r = 0; r < n; ++r) counts.push_back(r % 3 == 1 ? 0 : count + r);
  const std::int64_t own = counts[static_cast<std::size_t>(me)];
  out = at::full({own}, 0, out.options());
  check(comm.reduce_scatter_uneven(out, mine(total_of(counts)), counts, {.op = op, .async = async}), out,
        result(begin_of(counts, me), own), "reduce_scatter_uneven");
}
}  // namespace

// Small sizes only; other cases test the sizes.
void suite_every_type(Communicator& comm) {
  Checks checks(false);
  for (const std::int64_t count : {0, 1, 129}) {
    for (const ScalarType type : kTypes) suite_every_type_moved(comm, type, count, checks);
    for_each_reduction([&](ScalarType type, ReduceOp op) { suite_every_type_reduced(comm, type, op, count, checks); });
  }
}

// Starts every verb asynchronously, with all operations of one type under way at once.
void suite_every_type_async(Communicator& comm) {
  for (const ScalarType type : kTypes) {
    // In large worlds: one type that is reduced directly, one that is reduced in float32, and one integer type.
    const bool is_chosen = type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Byte;
    if (!is_small_world(comm) && !is_chosen) continue;
    Checks checks(true);
    for (const std::int64_t count : {std::int64_t{129}, std::int64_t{0}, suite_sizes(comm, {20'011}).back()}) {
      if (count > 129 && type != ScalarType::Float && type != ScalarType::BFloat16) continue;
      suite_every_type_moved(comm, type, count, checks);
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) suite_every_type_reduced(comm, type, op, count, checks);
    }
    checks.finish();
  }
}

// Messages of every type and of different lengths, including an empty and a large one, in both directions with both
// neighbours in one batch. The receiver lists them in another order than the sender if their tags distinguish them.
void suite_mixed_batch(Communicator& comm) {
  const int n = comm.size();
  const int me = comm.rank();
  const int next = (me + 1) % n;
  const int before = (me + n - 1) % n;
  constexpr std::array<std::int64_t, kTypes.size()> kCounts{70'001, 0, 3, 20'011, 129, 1, 9'001, 8};
  for (const bool async : {false, true}) {
    std::vector<Communicator::P2POp> sends;
    std::vector<Communicator::P2POp> receives;
    std::vector<at::Tensor> expected;
    for (const bool up : {true, false}) {
      const int to = up ? next : before;
      const int from = up ? before : next;
      for (std::size_t k = 0; k < kTypes.size(); ++k) {
        const int tag = static_cast<int>(2 * k) + (up ? 1 : 0);
        sends.push_back({true, part_for(me, tag, kCounts[k], kTypes[k]), to, tag});
        expected.push_back(part_for(from, tag, kCounts[k], kTypes[k]));
        receives.push_back({false, blank_like(expected.back()), from, tag});
      }
    }
    std::vector<Communicator::P2POp> batch = receives;
    if (!matches_in_order(comm)) std::reverse(batch.begin(), batch.end());
    batch.insert(batch.end(), sends.begin(), sends.end());
    comm.batch_isend_irecv(std::move(batch), {.async = async}).wait();
    for (std::size_t k = 0; k < receives.size(); ++k)
      require_equal(receives[k].tensor, expected[k],
                    fmt::format("{}batch: tag {} from rank {}, {}", async ? "asynchronous " : "", receives[k].tag,
                                receives[k].peer, c10::toString(expected[k].scalar_type())));
  }
}

}  // namespace phalanx::suite
