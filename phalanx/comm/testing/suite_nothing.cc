// Ranks without input or without output in the uneven verbs: the first, the last, all but one, or all.
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include "phalanx/comm/testing/suite_parts.h"

namespace phalanx::suite {
namespace {

struct Have {
  const char* who;  // the ranks with data
  bool (*has)(int rank, int world);
};
constexpr std::array kHave{Have{"all but rank 0", [](int rank, int) { return rank != 0; }},
                           Have{"all but the last rank", [](int rank, int world) { return rank != world - 1; }},
                           Have{"rank 0 alone", [](int rank, int) { return rank == 0; }},
                           Have{"the last rank alone", [](int rank, int world) { return rank == world - 1; }},
                           Have{"nobody", [](int, int) { return false; }}};

at::Tensor none_of(std::int64_t count, ScalarType type) {
  return at::full({count}, 0, at::TensorOptions().dtype(type));
}

void check_uneven(Communicator& comm, const Have& have, std::int64_t count, ScalarType type) {
  const int n = comm.size();
  const int me = comm.rank();
  const auto what = [&](const char* verb) {
    return fmt::format("{} {} [{}], {} have something", verb, c10::toString(type), count, have.who);
  };
  std::vector<std::int64_t> counts;
  for (int r = 0; r < n; ++r) counts.push_back(have.has(r, n) ? count + r : 0);
  const auto count_of = [&](int r) { return counts[static_cast<std::size_t>(r)]; };

  const at::Tensor all = parts_of(comm, [&](int r) { return part_for(r, 0, count_of(r), type); });
  at::Tensor out = none_of(all.numel(), type);
  comm.all_gather_uneven(out, part_for(me, 0, count_of(me), type), counts);
  require_equal(out, all, what("all_gather_uneven"));

  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
    const at::Tensor in =
        make_tensor(total_of(counts), type, [&](std::int64_t i) { return suite_value(op, type, me, i); });
    out = none_of(count_of(me), type);
    comm.reduce_scatter_uneven(out, in, counts, {.op = op});
    require_equal(out,
                  make_tensor(count_of(me), type,
                              [&](std::int64_t i) { return suite_result(op, type, n, begin_of(counts, me) + i); }),
                  what("reduce_scatter_uneven"));
  }
}

// length(from, to): the number of elements from one rank to another.
template <class Length>
void check_exchange(Communicator& comm, ScalarType type, const std::string& what, Length length) {
  const int me = comm.rank();
  std::vector<std::int64_t> sends;
  std::vector<std::int64_t> receives;
  for (int r = 0; r < comm.size(); ++r) {
    sends.push_back(length(me, r));
    receives.push_back(length(r, me));
  }
  at::Tensor out = none_of(total_of(receives), type);
  comm.all_to_all_uneven(out, parts_of(comm, [&](int r) { return part_for(me, r, length(me, r), type); }), receives,
                         sends);
  require_equal(out, parts_of(comm, [&](int r) { return part_for(r, me, length(r, me), type); }), what);
}

}  // namespace

void suite_nothing(Communicator& comm) {
  const int n = comm.size();
  for (const ScalarType type : {ScalarType::Float, ScalarType::BFloat16}) {
    for (const std::int64_t count : suite_sizes(comm, {3, 70'001})) {
      for (const Have& have : kHave) {
        const auto what = [&](const char* does) {
          return fmt::format("all_to_all_uneven {} [{}], {} {}", c10::toString(type), count, have.who, does);
        };
        check_uneven(comm, have, count, type);
        check_exchange(comm, type, what("give something"),
                       [&](int from, int to) { return have.has(from, n) ? count + from + 2 * to : 0; });
        check_exchange(comm, type, what("get something"),
                       [&](int from, int to) { return have.has(to, n) ? count + from + 2 * to : 0; });
      }
    }
  }
}

}  // namespace phalanx::suite
