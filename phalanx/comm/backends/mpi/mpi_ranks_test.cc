// The functions (kBodies) of the ranks that mpi_backend_test.cc starts by mpirun.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>

#include "phalanx/base/error.h"
#include "phalanx/comm/backend.h"
#include "phalanx/comm/backends/mpi/mpi.h"
#include "phalanx/comm/backends/mpi/testing/mpi_ranks.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/liveness/process_probe.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/fault_calls.h"
#include "phalanx/comm/testing/nccl_hierarchical_rank.h"
#include "phalanx/store/hash_store.h"
#include "phalanx/store/tcp_store.h"

#ifdef PHALANX_HAVE_MPI
#include <mpi.h>

#include "phalanx/base/testing/error_text.h"
#include "phalanx/comm/backends/mpi/testing/mpi_calls.h"
#endif

namespace phalanx {
namespace {

using std::chrono::seconds;

int number_from(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? -1 : std::atoi(text);
}

struct MpiRank {
  int rank = number_from("OMPI_COMM_WORLD_RANK");
  int world = number_from("OMPI_COMM_WORLD_SIZE");
  std::shared_ptr<TcpStore> store;
  int rendezvous_count = 0;

  std::shared_ptr<Communicator> make(MpiOptions options = {}) const {
    return make_mpi_communicator(store, rank, world, std::move(options));
  }
  // No rank continues before all have arrived: a rank that ends after a failure ends the job, too.
  void meet() {
    const int number = rendezvous_count++;
    store->set(fmt::format("rendezvous/{}/{}", number, rank), "");
    std::vector<std::string> keys;
    for (int r = 0; r < world; ++r) keys.push_back(fmt::format("rendezvous/{}/{}", number, r));
    store->wait(keys, seconds(60));
  }
};

void run_suite(MpiRank& self, const char* which, const MpiOptions& options) {
  const auto comm = self.make(options);
  try {
    run_backend_suite(*comm, [&](const SuiteCase& test) { return !test.needs_rank_order || options.deterministic; });
  } catch (const std::exception& error) {
    throw std::runtime_error(fmt::format("{}, {}", which, error.what()));
  }
}

template <class Make>
void run_failures(MpiRank& self, Make make) {
  for (const SuiteCase& test : backend_failure_suite()) {
    try {
      const std::shared_ptr<Communicator> comm = make(failure_options(test));
      test.run(*comm);
      self.meet();
    } catch (const std::exception& e) {
      throw std::runtime_error(fmt::format("{}: {}", test.name, e.what()));
    }
  }
}

void body_suite(MpiRank& self) {
  run_suite(self, "MPI's order", {});
  run_suite(self, "rank order", {.deterministic = true});
  if (self.world == 3) {
    // As for tensors of more than 2^31 elements, with 20,000.
    run_suite(self, "pieces", {.largest_call = 20'000});
    run_suite(self, "pieces in rank order", {.deterministic = true, .largest_call = 20'000});
  }
  if (self.world > 1)
    run_failures(self, [&](const CommunicatorOptions& options) { return self.make({.communicator = options}); });
}

// Values for which MPI's own arithmetic would be wrong.
void check_arithmetic(MpiRank& self) {
  const auto comm = self.make();
  // 256 + 1 has no bfloat16: only a sum in float32 sees the ones.
  at::Tensor x = at::full({3}, self.rank == 0 ? 256.0 : 1.0, at::TensorOptions().dtype(c10::ScalarType::BFloat16));
  comm->all_reduce(x);
  const float sum = x.to(c10::ScalarType::Float).const_data_ptr<float>()[1];
  mpi_ranks::expect(sum == 258.0F, fmt::format("256 + 1 + 1 = {} in bfloat16", sum));
  at::Tensor y = at::full({3}, self.rank == 1 ? std::nanf("") : 1.0F);
  comm->all_reduce(y, {.op = ReduceOp::max});
  mpi_ranks::expect(std::isnan(y.const_data_ptr<float>()[2]), "the maximum with NaN is NaN");
}

FaultCall call_named(const std::string& name, int victim) {
  for (const FaultCall& call : fault_calls(victim))
    if (call.name == name) return call;
  throw std::runtime_error("no call is named " + name);
}

// One rank dies in the middle of a call; `comm` uses Open MPI, for everything or between nodes.
void die_in_a_call(Communicator& comm, int rank, int victim) {
  const FaultCall call = call_named(std::getenv("PHALANX_TEST_CALL"), victim);
  // Not through mpirun, which forwards nothing while it ends the job. The files' times show when.
  const std::string folder = std::getenv("PHALANX_TEST_FOLDER");
  mpi_ranks::expect(std::freopen((folder + "/said").c_str(), "a", stderr) != nullptr, "a file for the error");
  call.begin(comm, mpi_ranks::kDeathCount)();
  if (rank == victim) {
    const auto pending = call.begin(comm, mpi_ranks::kDeathCount);
    std::ofstream(folder + "/dies") << "now";
    kill(getpid(), SIGKILL);
  }
  try {
    for (;;) call.begin(comm, mpi_ranks::kDeathCount)();
  } catch (const CommError& error) {
    std::cerr << error.what() << std::endl;
    for (;;) pause();  // mpirun ends the job
  }
}

void body_death(MpiRank& self) {
  const auto comm = self.make({.communicator = {.name = "the world"}});
  die_in_a_call(*comm, self.rank, 1);
}

// The same with the fake NCCL inside two nodes of two ranks: one rank of the second node dies.
void body_hierarchical_death(MpiRank& self) {
  const CommunicatorOptions options{.name = "the world"};
  const auto rank = make_hierarchical_rank(self.make({.communicator = options}), *self.store,
                                           {.communicator = options, .nodes = {0, 0, 1, 1}});
  mpi_ranks::expect(rank->comm->backend_name() == "nccl+mpi", rank->comm->backend_name());
  die_in_a_call(*rank->comm, self.rank, mpi_ranks::kHierarchicalVictim);
}

// One rank stops when it has received a part of the data. Only the operation holds the tensor.
void body_stopped(MpiRank& self) {
  constexpr std::int64_t kCount = 30'000'000;
  const std::string folder = std::getenv("PHALANX_TEST_FOLDER");
  const auto comm = self.make(
      {.communicator = {.first_timeout = seconds(60), .timeout = seconds(2), .trace_folder = folder + "/traces"}});
  comm->barrier();
  comm->mark_started();
  while (self.rank == 0) {
    auto* data = new float[kCount];
    std::fill_n(data, kCount, 1.0F);
    Work work = comm->broadcast(at::from_blob(
                                    data, {kCount},
                                    [=](void*) {
                                      std::ofstream(folder + "/freed") << "now";
                                      delete[] data;
                                    },
                                    at::kFloat),
                                {.async = true});
    try {
      work.wait();
      work = Work();
      std::filesystem::remove(folder + "/freed");
    } catch (const CommError&) {
      work = Work();
      for (;;) pause();
    }
  }
  at::Tensor x = at::full({kCount}, 0.0F);
  Work work = comm->broadcast(x, {.async = true});
  const volatile float* first = x.const_data_ptr<float>();
  while (*first == 0.0F) continue;
  kill(getpid(), SIGSTOP);
}

// The same with a short heartbeat: long before the time-out.
void body_stopped_amidst_data(MpiRank& self) {
  const auto comm = self.make(
      {.communicator = {.name = "the world", .first_timeout = seconds(100), .heartbeat = mpi_ranks::kShortHeartbeat}});
  at::Tensor x = at::full({30'000'000}, self.rank == 0 ? 1.0F : 0.0F);
  const std::string folder = std::getenv("PHALANX_TEST_FOLDER");
  mpi_ranks::expect(std::freopen((folder + "/said").c_str(), "a", stderr) != nullptr, "a file for the error");
  comm->barrier();
  if (self.rank == 0) {
    for (;;) comm->broadcast(x);
  }
  if (self.rank == 2) {
    // It may have all its data. Then it gets an error, and must not end the job before rank 0 does.
    require_error<CommError>([&] {
      for (;;) comm->broadcast(x);
    });
    for (;;) pause();
  }
  Work work = comm->broadcast(x, {.async = true});
  const volatile float* first = x.const_data_ptr<float>();
  while (*first == 0.0F) continue;
  std::ofstream(folder + "/stops") << "now";
  kill(getpid(), SIGSTOP);
}

// Rank 1 stops. The other ranks call `wait_in_vain`, whose error is returned. Then rank 1 continues.
std::string while_rank_1_stands_still(MpiRank& self, const std::string& stop,
                                      const std::function<void()>& wait_in_vain) {
  if (self.rank == 1) {
    self.store->set(stop, std::to_string(getpid()));
    kill(getpid(), SIGSTOP);
    return {};
  }
  const int process = std::stoi(self.store->get(stop, seconds(30)));
  const auto begin = std::chrono::steady_clock::now();
  const std::string text = require_error<CommError>(wait_in_vain);
  const auto took = std::chrono::steady_clock::now() - begin;
  mpi_ranks::expect(took < 10 * mpi_ranks::kShortHeartbeat, "the error comes by the heartbeat");
  self.store->set(fmt::format("{}/told/{}", stop, self.rank), "");
  self.store->wait({stop + "/told/0", stop + "/told/2"}, seconds(60));
  if (self.rank == 0) kill(process, SIGCONT);
  return text;
}

void body_heartbeat(MpiRank& self) {
  const CommunicatorOptions options{
      .name = "the world", .first_timeout = seconds(100), .heartbeat = mpi_ranks::kShortHeartbeat};
  {
    const auto comm = self.make({.communicator = options});
    comm->barrier();
    const std::string text = while_rank_1_stands_still(self, "seen", [&] { comm->barrier(); });
    if (self.rank == 1)
      // It learns that the others have given it up.
      mpi_ranks::expect_in(require_error<CommError>([&] {
                             for (;;) comm->barrier();
                           }),
                           {"gave up", "is stopped (SIGSTOP)"});
    else
      mpi_ranks::expect_in(text,
                           {"barrier()", "op 1 ", "group 'the world'", "rank 1 is stopped (SIGSTOP)", "kill -CONT"});
    self.meet();
  }
  {
    // As on three nodes, where no rank sees another's process.
    const auto comm = self.make({.identity = fmt::format("machine{}:1 1 1", self.rank), .communicator = options});
    comm->barrier();
    at::Tensor x = at::full({10}, 1.0F);
    const std::string text = while_rank_1_stands_still(self, "silent", [&] { comm->recv(x, 1); });
    if (self.rank != 1) mpi_ranks::expect_in(text, {"recv(float32[10]", "rank 1 has given no sign of life"});
    self.meet();
  }
  // Rank 1 publishes its arrival and stops before it joins the others' group in MPI.
  if (self.rank == 1) self.store->set("mpi/3/world3/rank/1", ProcessProbe::identity());
  const std::string text = while_rank_1_stands_still(self, "making", [&] { self.make({.communicator = options}); });
  if (self.rank != 1)
    mpi_ranks::expect_in(text, {"group 'world3' of mpi could not be made", "rank 1 is stopped (SIGSTOP)"});
  self.meet();
}

#ifdef PHALANX_HAVE_MPI
// The issuing thread and the progress thread each have operations in flight, but only one of them at a time is in MPI.
void check_one_thread_in_mpi(MpiRank& self) {
  const auto comm = self.make();
  const auto other = comm->split(0, self.rank, "other");
  for (int round = 0; round < 100; ++round) {
    at::Tensor x = at::full({300'000}, 1.0F);
    const Work behind = comm->all_reduce(x, {.async = true});
    for (int k = 0; k < 5; ++k) other->all_reduce(at::full({5}, 1.0F));
    behind.wait();
    mpi_ranks::expect(x.const_data_ptr<float>()[299'999] == static_cast<float>(self.world), "the sum");
  }
  const MpiCalls seen = mpi_calls();
  mpi_ranks::expect(seen.calls > 1000 && seen.threads > 1,
                    fmt::format("{} calls by {} threads show nothing", seen.calls, seen.threads));
  mpi_ranks::expect(seen.most_at_once == 1, fmt::format("{} threads were in MPI at once", seen.most_at_once));
}
#endif

void body_others(MpiRank& self) {
  check_arithmetic(self);
  suite_async_soak(*self.make());
#ifdef PHALANX_HAVE_MPI
  check_one_thread_in_mpi(self);
#endif
  const std::string text =
      require_error<ConfigError>([&] { make_mpi_communicator(self.store, (self.rank + 1) % self.world, self.world); });
  mpi_ranks::expect_in(text, {"this process is rank", "but MPI calls it rank", "mpirun or srun"});
  mpi_ranks::expect_in(require_error<ConfigError>([&] { make_mpi_communicator(self.store, self.rank, 5); }),
                       {"of 5", "of 3"});
}

#ifdef PHALANX_HAVE_MPI
void body_own_mpi(MpiRank& self) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  self.make()->barrier();
  MPI_Barrier(MPI_COMM_WORLD);
  int is_finalised = 1;
  MPI_Finalized(&is_finalised);
  mpi_ranks::expect(is_finalised == 0, "the program's MPI was finalised");
  MPI_Finalize();
  mpi_ranks::expect_in(require_error<ConfigError>([&] { self.make(); }), {"MPI_Finalize"});
}

void body_own_mpi_without_threads(MpiRank& self) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SINGLE, &provided);
  mpi_ranks::expect(provided != MPI_THREAD_MULTIPLE,
                    "this MPI gives what was not asked for, so the test shows nothing");
  mpi_ranks::expect_in(require_error<ConfigError>([&] { self.make(); }), {"MPI_THREAD_MULTIPLE"});
  MPI_Finalize();
}
#endif

// Shared memory between ranks 0 and 1, MPI between them and rank 2.
void body_hierarchical(MpiRank& self) {
  const auto make = [&](MpiOptions options) {
    const CommunicatorOptions communicator = options.communicator;
    return make_hierarchical_communicator(self.make(std::move(options)), {.communicator = communicator,
                                                                          .nodes = {0, 0, 1},
                                                                          .hint = std::nullopt,
                                                                          .smallest_bytes = 1,
                                                                          .by_estimate = false,
                                                                          .piece_bytes = 100'000});
  };
  for (const bool deterministic : {false, true}) {
    const auto comm = make({.deterministic = deterministic});
    mpi_ranks::expect(comm->backend_name() == "shm+mpi", comm->backend_name());
    mpi_ranks::expect(comm->backend()->traits().rank_order_reduction == deterministic, "what the traits say");
    // `deterministic` concerns only MPI's own reductions; inter-node reductions are in rank order in either case.
    if (!deterministic) run_backend_suite(*comm);
    const CommVolume before = *comm_volume(*comm->backend());
    comm->broadcast(at::full({1000}, 1.0F));
    const CommVolume after = *comm_volume(*comm->backend());
    const std::uint64_t expected = self.rank == 0 ? 4000 : 0;
    mpi_ranks::expect(
        after.inter_node - before.inter_node == expected && after.intra_node - before.intra_node == expected,
        fmt::format("{} bytes inside, {} between", after.intra_node - before.intra_node,
                    after.inter_node - before.inter_node));
  }
  run_failures(self, [&](const CommunicatorOptions& options) { return make({.communicator = options}); });
}

// The fake NCCL on two nodes of two ranks, MPI between them.
void body_nccl_hierarchical(MpiRank& self) {
  const auto make = [&](const CommunicatorOptions& options) {
    return make_hierarchical_rank(self.make({.communicator = options}), *self.store,
                                  {.communicator = options, .nodes = {0, 0, 1, 1}});
  };
  const auto rank = make({});
  mpi_ranks::expect(rank->comm->backend_name() == "nccl+mpi", rank->comm->backend_name());
  run_backend_suite(*rank->comm, [](const SuiteCase& test) { return !test.needs_rank_order; });
  const CommVolume before = *comm_volume(*rank->comm->backend());
  rank->comm->all_gather(at::full({4000}, 0.0F), at::full({1000}, 1.0F));
  const CommVolume after = *comm_volume(*rank->comm->backend());
  mpi_ranks::expect(after.inter_node - before.inter_node == 4000,
                    fmt::format("{} bytes between", after.inter_node - before.inter_node));
  const auto row = rank->comm->split(self.rank % 2, self.rank);
  mpi_ranks::expect(row->backend_name() == "mpi", row->backend_name());
  const auto node = rank->comm->split(self.rank / 2, self.rank);
  mpi_ranks::expect(node->backend_name() == "nccl", node->backend_name());
  end_hierarchical_rank(*rank);
  self.meet();
  run_failures(self, [&](const CommunicatorOptions& options) {
    const auto made = make(options);
    return std::shared_ptr<Communicator>(made, made->comm.get());  // with its device and its library
  });
}

const std::map<std::string, void (*)(MpiRank&)> kBodies{
    {"suite", body_suite},
    {"death", body_death},
    {"stopped", body_stopped},
    {"others", body_others},
    {"heartbeat", body_heartbeat},
    {"stopped_amidst_data", body_stopped_amidst_data},
    {"two_levels", body_hierarchical},
    {"nccl_levels", body_nccl_hierarchical},
    {"levels_death", body_hierarchical_death},
#ifdef PHALANX_HAVE_MPI
    {"own_mpi", body_own_mpi},
    {"own_mpi_without_threads", body_own_mpi_without_threads},
#endif
};

// Not a case by itself: it runs in the processes that mpirun starts.
TEST(MpiRanks, DISABLED_Body) {
  MpiRank self;
  std::string result = "passed";
  try {
    self.store = std::make_shared<TcpStore>(parse_host_port(std::getenv("PHALANX_TEST_STORE"), "the store"));
    kBodies.at(std::getenv("PHALANX_TEST_BODY"))(self);
  } catch (const std::exception& e) {
    result = fmt::format("FAILED: {}", e.what());
  }
  fmt::print("rank {} {}\n", self.rank, result);
  std::fflush(stdout);
}

}  // namespace
}  // namespace phalanx
