#include "phalanx/measure/collectives/comm_bench.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/measure/collectives/comm_bench_call.h"
#include "phalanx/store/hash_store.h"

namespace phalanx::measure {
namespace {

CommBenchOptions every_case(int ranks) {
  CommBenchOptions options;
  options.verbs = parse_verbs("--ops", ranks > 1 ? "all" : "all_reduce,all_gather,reduce_scatter,gather,all_to_all");
  options.sizes = {200, 3000};
  options.types = parse_types("-d", "all");
  options.ops = parse_ops("-o", "all");
  options.places = {Place::out, Place::in};
  options.root = ranks - 1;
  return options;
}

std::string text_of_case(const CommBenchCase& what) {
  return fmt::format("{} {} {} {} [{}]", name_of(what.verb), name_of(what.type), name_of(what.op), name_of(what.place),
                     what.count);
}

bool can_run(const CommBenchCase& what) {
  return what.op != ReduceOp::avg || what.type == DataType::f32 || what.type == DataType::f64 ||
         what.type == DataType::f16 || what.type == DataType::bf16;
}

TEST(CommBenchCall, EveryCaseIsRightOnEveryWorld) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_local_ranks(ranks, [ranks](const std::shared_ptr<Communicator>& comm) {
      for (const CommBenchCase& what : bench_cases(every_case(ranks), ranks)) {
        if (!can_run(what)) continue;
        BenchCall call(what, comm->rank(), ranks, c10::Device(c10::kCPU));
        call.use(*comm);
        EXPECT_EQ(call.check(), 0) << "rank " << comm->rank() << " of " << ranks << ": " << text_of_case(what);
        call.run();
      }
    });
  }
}

TEST(CommBenchCall, ACallThatDoesNothingIsSeenToBeWrong) {
  // The copy does not change any result. Some rank must detect that, for every verb, type and op.
  constexpr int kRanks = 3;
  std::mutex mutex;
  std::set<std::string> seen, all;
  run_local_ranks(kRanks, [&](const std::shared_ptr<Communicator>& comm) {
    for (const CommBenchCase& what : bench_cases(every_case(kRanks), kRanks)) {
      if (!can_run(what) || what.verb == BenchVerb::barrier || what.verb == BenchVerb::pingpong) continue;
      BenchCall call(what, comm->rank(), kRanks, c10::Device(c10::kCPU));
      call.use_copy();
      const bool wrong = call.check() > 0;
      const std::lock_guard lock(mutex);
      all.insert(text_of_case(what));
      if (wrong) seen.insert(text_of_case(what));
    }
  });
  for (const std::string& what : all) EXPECT_TRUE(seen.contains(what)) << what;
}

ProcessContext context_of(const std::shared_ptr<Communicator>& comm, const std::shared_ptr<Store>& store) {
  ProcessContext context;
  context.rank = context.local_rank = comm->rank();
  context.world_size = context.local_world_size = comm->size();
  context.store = store;
  context.world = comm;
  return context;
}

CommBenchOptions quick_options() {
  CommBenchOptions options;
  options.verbs = {BenchVerb::all_reduce, BenchVerb::pingpong, BenchVerb::barrier};
  options.sizes = {1 << 10, 1 << 14};
  options.iterations = 5;
  options.rounds = 2;
  return options;
}

TEST(CommBench, RowsHaveFiguresInTheOrderOfTheCases) {
  const auto store = std::make_shared<HashStore>();
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    std::size_t told = 0;
    const auto result =
        run_comm_bench(context_of(comm, store), quick_options(), {.on_row = [&](const auto&, const auto&) { ++told; }});
    EXPECT_FALSE(result.stopped);
    if (comm->rank() != 0) return;
    ASSERT_EQ(result.rows.size(), 5U);
    EXPECT_EQ(told, 5U);
    EXPECT_EQ(result.rows[3].what.verb, BenchVerb::pingpong);
    for (const CommBenchRow& row : result.rows) {
      EXPECT_EQ(row.backend, "local");
      EXPECT_GT(row.p50, 0);
      EXPECT_LE(row.least, row.p50);
      EXPECT_LE(row.p50, row.p99);
      EXPECT_EQ(row.calls, 5);
      EXPECT_EQ(row.rounds, 2);
      EXPECT_EQ(row.wrong, 0);
      EXPECT_EQ(row.copy_seconds.has_value(), row.what.bytes() > 0);
      EXPECT_GE(row.slowest_rank, 0);
      EXPECT_LT(row.slowest_rank, 2);
    }
  });
}

TEST(CommBench, OneRanksWishToStopIsEverybodys) {
  const auto store = std::make_shared<HashStore>();
  std::atomic<bool> stop{false};
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    const bool watches = comm->rank() == 1;
    const auto result = run_comm_bench(context_of(comm, store), quick_options(),
                                       {.on_row = [&](const auto&, const auto&) { stop = true; },
                                        .stop_requested = [&, watches] { return watches && stop; }});
    EXPECT_TRUE(result.stopped);
    EXPECT_EQ(result.rows.size(), comm->rank() == 0 ? 1U : 0U);
  });
}

TEST(CommBench, AMeasurementIsCutShortByAllRanksAtOnce) {
  const auto store = std::make_shared<HashStore>();
  CommBenchOptions options = quick_options();
  options.verbs = {BenchVerb::all_reduce};
  options.iterations = std::int64_t{1} << 40;  // would take weeks
  options.backends = {"auto", "local"};        // communicators of these ranks, and ranks as threads of the first
  options.check = false;
  for (const bool in_threads : {false, true}) {
    if (in_threads) options.backends = {"local", "auto"};
    for (const int watcher : {0, 2}) {
      if (in_threads && watcher != 0) continue;  // rank 0 starts its threads
      std::atomic<int> asked{0};
      run_local_ranks(3, [&](const std::shared_ptr<Communicator>& comm) {
        const bool watches = comm->rank() == watcher;
        const int patience = in_threads ? 3 * 4 : 5;  // three threads ask at once
        // It is called once before the measurement and twice in its warm-up.
        const auto result = run_comm_bench(context_of(comm, store), options, {.stop_requested = [&, watches, patience] {
                                             return watches && asked.fetch_add(1) >= patience;
                                           }});
        EXPECT_TRUE(result.stopped);
        if (comm->rank() != 0) return;
        ASSERT_EQ(result.rows.size(), 1U);  // the other backend did not run
        EXPECT_EQ(result.rows[0].what.count, 255);
        EXPECT_GT(result.rows[0].calls, 0);
        EXPECT_LT(result.rows[0].calls, options.iterations);
        EXPECT_EQ(result.rows[0].rounds, 0);
        EXPECT_GT(result.rows[0].p50, 0);
      });
    }
  }
}

TEST(CommBench, AStopInTheWarmUpLeavesNoRow) {
  const auto store = std::make_shared<HashStore>();
  CommBenchOptions options = quick_options();
  options.warmup = 1 << 30;
  std::atomic<int> asked{0};
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    const bool watches = comm->rank() == 1;
    const auto result = run_comm_bench(context_of(comm, store), options,
                                       {.stop_requested = [&, watches] { return watches && asked.fetch_add(1) >= 3; }});
    EXPECT_TRUE(result.stopped);
    EXPECT_TRUE(result.rows.empty());
  });
}

TEST(CommBench, TheSlowestRankIsNamed) {
  constexpr int kRanks = 3;
  const auto store = std::make_shared<HashStore>();
  CommBenchOptions options = quick_options();
  options.verbs = {BenchVerb::broadcast};
  options.backends = {"uneven"};
  options.check = false;  // its calls do nothing
  options.copy = false;
  for (int slow = 0; slow < kRanks; ++slow) {
    const BenchBaseline uneven{"uneven", [slow](const CommBenchCase&, int rank, int, const BenchBuffers&) {
                                 return [=] {
                                   if (rank == slow) std::this_thread::sleep_for(std::chrono::milliseconds(3));
                                 };
                               }};
    run_local_ranks(kRanks, [&](const std::shared_ptr<Communicator>& comm) {
      const auto result = run_comm_bench(context_of(comm, store), options, {.baselines = {uneven}});
      if (comm->rank() != 0) return;
      ASSERT_EQ(result.rows.size(), 2U);
      for (const CommBenchRow& row : result.rows) {
        EXPECT_EQ(row.slowest_rank, slow);
        EXPECT_GE(row.p50, 3e-3);  // the row has its values
        EXPECT_GE(row.least, 3e-3);
      }
    });
  }
}

TEST(CommBench, ABackendThatCannotBeHadIsNamed) {
  const auto store = std::make_shared<HashStore>();
  CommBenchOptions options = quick_options();
  EXPECT_EQ(world_backend(options), "auto");
  options.backends = {"auto", "mpi"};
  EXPECT_EQ(world_backend(options), "mpi");  // init_from_environment() checks it
  EXPECT_THROW(
      try {
        run_local_ranks(
            2, [&](const std::shared_ptr<Communicator>& comm) { run_comm_bench(context_of(comm, store), options); });
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("'mpi' cannot be measured beside 'local'"));
        throw;
      },
      Error);
}

}  // namespace
}  // namespace phalanx::measure
