// The mpi backend under mpirun: the suite, misuse, deaths and time-outs. A case starts ranks of this same program that
// run one function of kBodies; mpirun and the test see what they print.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/comm/backend.h"
#include "phalanx/comm/backend_suite.h"
#include "phalanx/comm/local_store.h"
#include "phalanx/comm/mpi.h"
#include "phalanx/comm/peer_processes.h"
#include "phalanx/comm/tcp_store.h"
#include "phalanx/comm/testing/fault_calls.h"
#include "phalanx/comm/testing/nccl_levels_rank.h"
#include "phalanx/comm/two_level.h"

#ifdef PHALANX_HAVE_MPI
#include <mpi.h>

#include "phalanx/comm/testing/mpi_calls.h"
#endif

namespace phalanx {
namespace {

using std::chrono::seconds;

// --- what mpirun starts ---------------------------------------------------------------------------------------------

int number_from(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? -1 : std::atoi(text);
}

struct MpiRank {
  int rank = number_from("OMPI_COMM_WORLD_RANK");
  int world = number_from("OMPI_COMM_WORLD_SIZE");
  std::shared_ptr<TcpStore> store;
  int meetings = 0;

  std::shared_ptr<Communicator> make(MpiOptions options = {}) const {
    return make_mpi_communicator(store, rank, world, std::move(options));
  }
  // Nobody goes on before all have come: a rank that ends after a failure takes the job with it.
  void meet() {
    const int number = meetings++;
    store->set(fmt::format("meeting/{}/{}", number, rank), "");
    std::vector<std::string> keys;
    for (int r = 0; r < world; ++r) keys.push_back(fmt::format("meeting/{}/{}", number, r));
    store->wait(keys, seconds(60));
  }
};

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

template <class ErrorType, class Body>
std::string mpi_error_of(Body body) {
  try {
    body();
  } catch (const ErrorType& error) {
    return error.what();
  }
  throw std::runtime_error("no error");
}

void expect_in(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    expect(text.find(part) != std::string::npos, fmt::format("'{}' is not in: {}", part, text));
}

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

// Values for which MPI's own arithmetic would not do.
void check_arithmetic(MpiRank& self) {
  const auto comm = self.make();
  // 256 + 1 has no bfloat16: only a sum in float32 sees the ones.
  at::Tensor x = at::full({3}, self.rank == 0 ? 256.0 : 1.0, at::TensorOptions().dtype(c10::ScalarType::BFloat16));
  comm->all_reduce(x);
  const float sum = x.to(c10::ScalarType::Float).const_data_ptr<float>()[1];
  expect(sum == 258.0F, fmt::format("256 + 1 + 1 = {} in bfloat16", sum));
  at::Tensor y = at::full({3}, self.rank == 1 ? std::nanf("") : 1.0F);
  comm->all_reduce(y, {.op = ReduceOp::max});
  expect(std::isnan(y.const_data_ptr<float>()[2]), "the maximum with NaN is NaN");
}

constexpr std::int64_t kDeathCount = 1'000'000;

FaultCall call_named(const std::string& name, int victim) {
  for (const FaultCall& call : fault_calls(victim))
    if (call.name == name) return call;
  throw std::runtime_error("no call is named " + name);
}

// One rank dies in the middle of a call; `comm` is over Open MPI, wholly or between machines.
void die_in_a_call(Communicator& comm, int rank, int victim) {
  const FaultCall call = call_named(std::getenv("PHALANX_TEST_CALL"), victim);
  // Past mpirun, which passes on nothing while it ends the job. The files' times say when.
  const std::string folder = std::getenv("PHALANX_TEST_FOLDER");
  expect(std::freopen((folder + "/said").c_str(), "a", stderr) != nullptr, "a file for the error");
  call.begin(comm, kDeathCount)();
  if (rank == victim) {
    const auto pending = call.begin(comm, kDeathCount);
    std::ofstream(folder + "/dies") << "now";
    kill(getpid(), SIGKILL);
  }
  try {
    for (;;) call.begin(comm, kDeathCount)();
  } catch (const CommError& error) {
    std::cerr << error.what() << std::endl;
    for (;;) pause();  // mpirun ends the job
  }
}

void body_death(MpiRank& self) {
  const auto comm = self.make({.communicator = {.name = "the world"}});
  die_in_a_call(*comm, self.rank, 1);
}

// The same with NCCL's double inside two machines of two ranks: one of the second dies.
constexpr int kLevelsVictim = 2;

void body_levels_death(MpiRank& self) {
  const CommunicatorOptions options{.name = "the world"};
  const auto rank = make_levels_rank(self.make({.communicator = options}), *self.store,
                                     {.communicator = options, .machines = {0, 0, 1, 1}});
  expect(rank->comm->backend_name() == "nccl+mpi", rank->comm->backend_name());
  die_in_a_call(*rank->comm, self.rank, kLevelsVictim);
}

// One rank stops when it has got a part of the data. The tensor is nobody's but the operation's.
void body_stopped(MpiRank& self) {
  constexpr std::int64_t kCount = 30'000'000;
  const std::string folder = std::getenv("PHALANX_TEST_FOLDER");
  const auto comm = self.make(
      {.communicator = {.first_timeout = seconds(60), .timeout = seconds(1), .trace_folder = folder + "/traces"}});
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

constexpr std::chrono::milliseconds kShortHeartbeat{2'000};

// The same with a short heartbeat: long before the time-out.
void body_stopped_amidst_data(MpiRank& self) {
  const auto comm =
      self.make({.communicator = {.name = "the world", .first_timeout = seconds(100), .heartbeat = kShortHeartbeat}});
  at::Tensor x = at::full({30'000'000}, self.rank == 0 ? 1.0F : 0.0F);
  const std::string folder = std::getenv("PHALANX_TEST_FOLDER");
  expect(std::freopen((folder + "/said").c_str(), "a", stderr) != nullptr, "a file for the error");
  comm->barrier();
  if (self.rank == 0) {
    for (;;) comm->broadcast(x);
  }
  if (self.rank == 2) {
    // It may have all its data. Then it gets an error, and must not end the job before rank 0 does.
    mpi_error_of<CommError>([&] {
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

// Rank 1 stops; whoever is not it calls `wait_in_vain`, whose error is returned; then rank 1 goes on.
std::string while_rank_1_stands_still(MpiRank& self, const std::string& stop,
                                      const std::function<void()>& wait_in_vain) {
  if (self.rank == 1) {
    self.store->set(stop, std::to_string(getpid()));
    kill(getpid(), SIGSTOP);
    return {};
  }
  const int process = std::stoi(self.store->get(stop, seconds(30)));
  const auto begin = std::chrono::steady_clock::now();
  const std::string text = mpi_error_of<CommError>(wait_in_vain);
  const auto took = std::chrono::steady_clock::now() - begin;
  expect(took < 10 * kShortHeartbeat, "the error comes by the heartbeat");
  self.store->set(fmt::format("{}/told/{}", stop, self.rank), "");
  self.store->wait({stop + "/told/0", stop + "/told/2"}, seconds(60));
  if (self.rank == 0) kill(process, SIGCONT);
  return text;
}

void body_heartbeat(MpiRank& self) {
  const CommunicatorOptions options{.name = "the world", .first_timeout = seconds(100), .heartbeat = kShortHeartbeat};
  {
    const auto comm = self.make({.communicator = options});
    comm->barrier();
    const std::string text = while_rank_1_stands_still(self, "seen", [&] { comm->barrier(); });
    if (self.rank == 1)
      // It learns that the others have given it up.
      expect_in(mpi_error_of<CommError>([&] {
                  for (;;) comm->barrier();
                }),
                {"gave up", "is stopped (SIGSTOP)"});
    else
      expect_in(text, {"barrier()", "op 1 ", "group 'the world'", "rank 1 is stopped (SIGSTOP)", "kill -CONT"});
    self.meet();
  }
  {
    // As on three machines, where nobody sees another's process.
    const auto comm = self.make({.identity = fmt::format("machine{}:1 1 1", self.rank), .communicator = options});
    comm->barrier();
    at::Tensor x = at::full({10}, 1.0F);
    const std::string text = while_rank_1_stands_still(self, "silent", [&] { comm->recv(x, 1); });
    if (self.rank != 1) expect_in(text, {"recv(float32[10]", "rank 1 has given no sign of life"});
    self.meet();
  }
  // Rank 1 says that it is there and stops before it joins the others' group in MPI.
  if (self.rank == 1) self.store->set("mpi/3/world3/rank/1", PeerProcesses::identity());
  const std::string text = while_rank_1_stands_still(self, "making", [&] { self.make({.communicator = options}); });
  if (self.rank != 1) expect_in(text, {"group 'world3' of mpi could not be made", "rank 1 is stopped (SIGSTOP)"});
  self.meet();
}

#ifdef PHALANX_HAVE_MPI
// The issuing thread and the progress thread have operations of their own under way, and one of them at a time is in
// MPI.
void check_one_thread_in_mpi(MpiRank& self) {
  const auto comm = self.make();
  const auto other = comm->split(0, self.rank, "other");
  for (int round = 0; round < 100; ++round) {
    at::Tensor x = at::full({300'000}, 1.0F);
    const Work behind = comm->all_reduce(x, {.async = true});
    for (int k = 0; k < 5; ++k) other->all_reduce(at::full({5}, 1.0F));
    behind.wait();
    expect(x.const_data_ptr<float>()[299'999] == static_cast<float>(self.world), "the sum");
  }
  const MpiCalls seen = mpi_calls();
  expect(seen.calls > 1000 && seen.threads > 1,
         fmt::format("{} calls by {} threads show nothing", seen.calls, seen.threads));
  expect(seen.most_at_once == 1, fmt::format("{} threads were in MPI at once", seen.most_at_once));
}
#endif

void body_others(MpiRank& self) {
  check_arithmetic(self);
  suite_async_soak(*self.make());
#ifdef PHALANX_HAVE_MPI
  check_one_thread_in_mpi(self);
#endif
  const std::string text =
      mpi_error_of<ConfigError>([&] { make_mpi_communicator(self.store, (self.rank + 1) % self.world, self.world); });
  expect_in(text, {"this process is rank", "but MPI calls it rank", "mpirun or srun"});
  expect_in(mpi_error_of<ConfigError>([&] { make_mpi_communicator(self.store, self.rank, 5); }), {"of 5", "of 3"});
}

#ifdef PHALANX_HAVE_MPI
void body_own_mpi(MpiRank& self) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  self.make()->barrier();
  MPI_Barrier(MPI_COMM_WORLD);
  int is_finalised = 1;
  MPI_Finalized(&is_finalised);
  expect(is_finalised == 0, "the program's MPI was finalised");
  MPI_Finalize();
  expect_in(mpi_error_of<ConfigError>([&] { self.make(); }), {"MPI_Finalize"});
}

void body_own_mpi_without_threads(MpiRank& self) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SINGLE, &provided);
  expect(provided != MPI_THREAD_MULTIPLE, "this MPI gives what was not asked for, so the test shows nothing");
  expect_in(mpi_error_of<ConfigError>([&] { self.make(); }), {"MPI_THREAD_MULTIPLE"});
  MPI_Finalize();
}
#endif

// Shared memory between ranks 0 and 1, MPI between them and rank 2.
void body_two_levels(MpiRank& self) {
  const auto make = [&](MpiOptions options) {
    const CommunicatorOptions communicator = options.communicator;
    return make_two_level_communicator(self.make(std::move(options)), {.communicator = communicator,
                                                                       .machines = {0, 0, 1},
                                                                       .hint = std::nullopt,
                                                                       .smallest_bytes = 1,
                                                                       .by_estimate = false,
                                                                       .piece_bytes = 100'000});
  };
  for (const bool deterministic : {false, true}) {
    const auto comm = make({.deterministic = deterministic});
    expect(comm->backend_name() == "shm+mpi", comm->backend_name());
    expect(comm->backend()->traits().rank_order_reduction == deterministic, "what the traits say");
    // Of MPI it concerns what that does by itself; in rank order all the same, as they go from machine to machine.
    if (!deterministic) run_backend_suite(*comm);
    const TransportBytes before = *transport_bytes(*comm->backend());
    comm->broadcast(at::full({1000}, 1.0F));
    const TransportBytes after = *transport_bytes(*comm->backend());
    const std::uint64_t expected = self.rank == 0 ? 4000 : 0;
    expect(after.between - before.between == expected && after.inside - before.inside == expected,
           fmt::format("{} bytes inside, {} between", after.inside - before.inside, after.between - before.between));
  }
  run_failures(self, [&](const CommunicatorOptions& options) { return make({.communicator = options}); });
}

// NCCL, that is its double, on two machines of two ranks, MPI between them.
void body_nccl_levels(MpiRank& self) {
  const auto make = [&](const CommunicatorOptions& options) {
    return make_levels_rank(self.make({.communicator = options}), *self.store,
                            {.communicator = options, .machines = {0, 0, 1, 1}});
  };
  const auto rank = make({});
  expect(rank->comm->backend_name() == "nccl+mpi", rank->comm->backend_name());
  run_backend_suite(*rank->comm, [](const SuiteCase& test) { return !test.needs_rank_order; });
  const TransportBytes before = *transport_bytes(*rank->comm->backend());
  rank->comm->all_gather(at::full({4000}, 0.0F), at::full({1000}, 1.0F));
  const TransportBytes after = *transport_bytes(*rank->comm->backend());
  expect(after.between - before.between == 4000, fmt::format("{} bytes between", after.between - before.between));
  const auto row = rank->comm->split(self.rank % 2, self.rank);
  expect(row->backend_name() == "mpi", row->backend_name());
  const auto machine = rank->comm->split(self.rank / 2, self.rank);
  expect(machine->backend_name() == "nccl", machine->backend_name());
  end_levels_rank(*rank);
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
    {"two_levels", body_two_levels},
    {"nccl_levels", body_nccl_levels},
    {"levels_death", body_levels_death},
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

// --- the cases ------------------------------------------------------------------------------------------------------

std::string why_no_mpirun() {
  if (!mpi_library()) return "this build has no MPI";
  const std::string path = std::getenv("PATH") == nullptr ? "" : std::getenv("PATH");
  for (std::size_t at = 0; at <= path.size();) {
    const std::size_t colon = std::min(path.find(':', at), path.size());
    if (access((path.substr(at, colon - at) + "/mpirun").c_str(), X_OK) == 0) return {};
    at = colon + 1;
  }
  return "there is no mpirun on the PATH";
}

struct MpiJob {
  int status = -1;  // mpirun's
  std::string output;
  int passed() const {
    int count = 0;
    for (std::size_t at = 0; (at = output.find(" passed\n", at)) != std::string::npos; ++at) ++count;
    return count;
  }
};

MpiJob run_under_mpirun_once(int world, const std::string& body, seconds limit) {
  TcpStoreServer server;
  const std::string store = server.address().text();
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string count = std::to_string(world);
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("no pipe");
  const auto begin = std::chrono::steady_clock::now();
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // mpirun then ends its ranks
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMPI_MCA_btl_base_warn_component_unused", "0", 1);
    setenv("PHALANX_TEST_STORE", store.c_str(), 1);
    setenv("PHALANX_TEST_BODY", body.c_str(), 1);
    unsetenv("GTEST_FILTER");
    execlp("mpirun", "mpirun", "-np", count.c_str(), "--oversubscribe", "--bind-to", "none", program.c_str(),
           "--gtest_brief=1", "--gtest_also_run_disabled_tests", "--gtest_filter=MpiRanks.DISABLED_Body", nullptr);
    _exit(127);
  }
  close(ends[1]);
  MpiJob job;
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(begin + limit - std::chrono::steady_clock::now());
    pollfd readable{ends[0], POLLIN, 0};
    if (left.count() <= 0 || poll(&readable, 1, static_cast<int>(left.count())) == 0) {
      job.output += fmt::format("\nstill running after {} s: ended by the test\n", limit.count());
      kill(child, SIGTERM);
      break;
    }
    char buffer[4096];
    const auto length = read(ends[0], buffer, sizeof buffer);
    if (length <= 0) break;
    job.output.append(buffer, static_cast<std::size_t>(length));
  }
  close(ends[0]);
  waitpid(child, &job.status, 0);
  return job;
}

// Once more, and again, where a rank found an error late; see again_if_late().
MpiJob run_under_mpirun(int world, const std::string& body, seconds limit = seconds(120)) {
  MpiJob job = run_under_mpirun_once(world, body, limit);
  for (int more = 0; more < 2 && job.output.find(": late: ") != std::string::npos; ++more) {
    std::cerr << "tried again, since this was late:\n" << job.output << "\n";
    job = run_under_mpirun_once(world, body, limit);
  }
  return job;
}

#define PHALANX_NEEDS_MPIRUN() \
  if (const std::string why = why_no_mpirun(); !why.empty()) GTEST_SKIP() << "skipped: " << why

class MpiWorlds : public ::testing::TestWithParam<int> {};

TEST_P(MpiWorlds, PassTheSuiteAndFailClearly) {
  PHALANX_NEEDS_MPIRUN();
  const MpiJob job = run_under_mpirun(GetParam(), "suite");
  EXPECT_EQ(job.passed(), GetParam()) << job.output;
}

INSTANTIATE_TEST_SUITE_P(Processes, MpiWorlds, ::testing::Values(1, 2, 3, 4, 8));

// 16-bit floats and NaN, 10,000 asynchronous operations, one thread at a time in MPI, and ranks that are not those of
// MPI.
TEST(MpiBackend, KeepsTheContractInDetail) {
  PHALANX_NEEDS_MPIRUN();
  const MpiJob job = run_under_mpirun(3, "others");
  EXPECT_EQ(job.passed(), 3) << job.output;
  EXPECT_EQ(job.status, 0) << job.output;  // MPI was finalised everywhere
}

TEST(MpiBackend, CarriesTwoLevels) {
  PHALANX_NEEDS_MPIRUN();
  const MpiJob job = run_under_mpirun(3, "two_levels");
  EXPECT_EQ(job.passed(), 3) << job.output;
}

TEST(MpiBackend, CarriesWhatNcclDoesNot) {
  PHALANX_NEEDS_MPIRUN();
  const MpiJob job = run_under_mpirun(4, "nccl_levels");
  EXPECT_EQ(job.passed(), 4) << job.output;
}

// A folder that the ranks find in their environment.
class MpiFolder {
 public:
  MpiFolder() { setenv("PHALANX_TEST_FOLDER", folder_.path().c_str(), 1); }
  ~MpiFolder() { unsetenv("PHALANX_TEST_FOLDER"); }
  bool has(const char* name) const { return std::filesystem::exists(folder_.path() / name); }
  std::string text(const char* name) const {
    std::stringstream text;
    text << std::ifstream(folder_.path() / name).rdbuf();
    return text.str();
  }
  std::filesystem::file_time_type written(const char* name) const {
    return std::filesystem::last_write_time(folder_.path() / name);
  }

 private:
  TempDirectory folder_;
};

std::string mpi_death_at(const FaultCall& call, bool beside_nccl) {
  const int victim = beside_nccl ? kLevelsVictim : 1;
  const MpiFolder folder;
  setenv("PHALANX_TEST_CALL", call.name.c_str(), 1);
  const MpiJob job = run_under_mpirun(beside_nccl ? 4 : 3, beside_nccl ? "levels_death" : "death", seconds(60));
  unsetenv("PHALANX_TEST_CALL");
  const std::string said = folder.text("said");
  try {
    expect(job.status != 0 && folder.has("dies"), "the rank did not die\n" + job.output);
    const std::string dead = fmt::format("rank {} has died", victim);
    expect_in(said, {dead.c_str(), "group 'the world'"});
    // Whoever came to say it before mpirun ended him.
    std::istringstream lines(said);
    for (std::string line; std::getline(lines, line);) {
      if (line.find(" has died") != std::string::npos) expect_in(line, {dead.c_str()});
      if (line.find(", rank ") != std::string::npos) require_told(call, line, kDeathCount, victim);
    }
    require_told(call, said, kDeathCount, victim);
    // A group in the making holds nothing of the caller's. Beside NCCL, MPI has staging memory: those who wait for the
    // streams' part get the error, and mpirun ends the job.
    if (call.name != "split") expect_in(said, {"op "});
    if (call.name != "split" && (!beside_nccl || !call.moves_tensors)) expect_in(said, {"ends the job"});
  } catch (const std::exception& error) {
    return fmt::format("{}: {}\n{}{}\n", call.name, error.what(), said, job.output);
  }
  const auto took = folder.written("said") - folder.written("dies");
  return took < seconds(1) ? ""
                           : fmt::format("late: {}: after {} ms\n", call.name, took / std::chrono::milliseconds(1));
}

// Each call takes an mpirun, so the default tests take some; PHALANX_ALL_DEATHS=1 (make deaths) takes all.
void expect_told_of_deaths(bool beside_nccl, const std::vector<std::string>& slice) {
  const bool all = std::getenv("PHALANX_ALL_DEATHS") != nullptr;
  std::size_t ran = 0;
  for (const FaultCall& call : fault_calls(beside_nccl ? kLevelsVictim : 1)) {
    if (call.prepare) continue;  // symmetric memory is shm's
    if (!all && std::find(slice.begin(), slice.end(), call.name) == slice.end()) continue;
    ++ran;
    EXPECT_EQ(again_if_late([&] { return mpi_death_at(call, beside_nccl); }), "");
  }
  EXPECT_GE(ran, slice.size());
}

TEST(MpiBackend, ADeadRankIsNamedWithinASecondAndEndsTheJob) {
  PHALANX_NEEDS_MPIRUN();
  expect_told_of_deaths(false, {"uneven all_gather", "recv", "split"});
}

TEST(MpiBackend, ADeadRankBesideNcclIsNamedWithinASecondAndEndsTheJob) {
  PHALANX_NEEDS_MPIRUN();
  expect_told_of_deaths(true, {"all_gather", "send", "broadcast_bytes"});
}

TEST(MpiBackend, ATimeOutAmidstDataEndsTheJobAndKeepsTheTensors) {
  PHALANX_NEEDS_MPIRUN();
  const MpiFolder folder;
  const MpiJob job = run_under_mpirun(2, "stopped", seconds(60));
  EXPECT_NE(job.status, 0);
  for (const char* part : {"broadcast(float32[30000000], root 0)", "timed out after", "rank 1", "ends the job"})
    EXPECT_NE(job.output.find(part), std::string::npos) << part << "\n" << job.output;
  EXPECT_FALSE(folder.has("freed")) << "the tensor was freed while MPI had it";
  EXPECT_THAT(folder.text("traces/rank_0.json"), ::testing::HasSubstr("timed out after")) << job.output;
}

TEST(MpiBackend, AStoppedRankIsToldWithinTheHeartbeatLimit) {
  PHALANX_NEEDS_MPIRUN();
  const MpiJob job = run_under_mpirun(3, "heartbeat", seconds(60));
  EXPECT_EQ(job.passed(), 3) << job.output;
}

TEST(MpiBackend, ARankStoppedAmidstDataEndsTheJobWithinTheHeartbeatLimit) {
  PHALANX_NEEDS_MPIRUN();
  const MpiFolder folder;
  const MpiJob job = run_under_mpirun(3, "stopped_amidst_data", seconds(60));
  EXPECT_NE(job.status, 0);
  const std::string said = folder.text("said");
  for (const char* part : {"rank 1 is stopped (SIGSTOP)", "broadcast(float32[30000000], root 0)", "group 'the world'",
                           "op ", "ends the job"})
    EXPECT_NE(said.find(part), std::string::npos) << part << "\n" << said << job.output;
  // Ten times the limit is too late on any machine.
  EXPECT_LT(folder.written("said") - folder.written("stops"), 10 * kShortHeartbeat);
}

TEST(MpiBackend, AProgramsOwnMpiIsUsedAndNotFinalised) {
  PHALANX_NEEDS_MPIRUN();
  MpiJob job = run_under_mpirun(2, "own_mpi");
  EXPECT_EQ(job.passed(), 2) << job.output;
  EXPECT_EQ(job.status, 0) << job.output;
  job = run_under_mpirun(1, "own_mpi_without_threads");
  EXPECT_EQ(job.passed(), 1) << job.output;
}

#ifdef PHALANX_HAVE_MPI
TEST(MpiBackend, ARankThatSrunStartsWithoutPmixIsToldWhatToDo) {
  const std::map<std::string, std::string> variables{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}};
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  expect_in(mpi_error_of<ConfigError>([] { make_mpi_communicator(std::make_shared<LocalStore>(), 0, 1); }),
            {"srun --mpi=pmix", "mpirun"});
  for (const auto& [name, value] : variables) unsetenv(name.c_str());
}
#endif

#ifndef PHALANX_HAVE_MPI
TEST(MpiBackend, ABuildWithoutMpiSaysSo) {
  EXPECT_EQ(mpi_library(), std::nullopt);
  EXPECT_THAT(mpi_error_of<ConfigError>([] { make_mpi_communicator(nullptr, 0, 1); }),
              ::testing::HasSubstr("this build has no MPI"));
}
#endif

}  // namespace
}  // namespace phalanx
