// The soak test. Worlds of 2 to 8 ranks communicate at random. At a random time, which may be during the creation of
// the world, one rank is killed, stopped for good, or stopped for a moment. This repeats over the same store. Every
// rank must end by itself and in time, with an error that names the culprit (after a short stop it may also succeed).
// No process and no shared memory may be left.
//
// PHALANX_SOAK_FAULTS (default 12) and PHALANX_SOAK_SEED set the number of faults and the seed; `make soak` runs 200.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/fault_world.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kSoakHeartbeat{1'500};

enum class Fault { kill, stop, pause };
// hierarchical: shared memory inside two simulated nodes (the lower and the upper half of the ranks), gloo between
// them.
enum class SoakBackend { shm, gloo, hierarchical };

std::string name_of(SoakBackend backend) {
  return backend == SoakBackend::shm ? "shm" : backend == SoakBackend::gloo ? "gloo" : "shm+gloo";
}

struct Round {
  int number = 0;
  int size = 2;
  int victim = 0;
  SoakBackend backend = SoakBackend::shm;
  Fault fault = Fault::kill;
  std::chrono::microseconds delay{};  // from the first rank's start
  std::uint64_t seed = 0;             // of the ranks' communication

  std::string text() const {
    return fmt::format("fault {}: {} of {}, rank {} {}, after {} ms", number, name_of(backend), size, victim,
                       fault == Fault::kill   ? "killed"
                       : fault == Fault::stop ? "stopped"
                                              : "paused",
                       delay.count() / 1000);
  }
};

Round draw(std::mt19937_64& random, int number) {
  const auto up_to = [&](int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); };
  Round round;
  round.number = number;
  round.size = 2 + up_to(7);
  round.victim = up_to(round.size);
  round.backend = std::array{SoakBackend::shm, SoakBackend::shm, SoakBackend::gloo, SoakBackend::gloo,
                             SoakBackend::hierarchical}[static_cast<std::size_t>(up_to(5))];
  const int dice = up_to(10);
  round.fault = dice < 6 ? Fault::kill : dice < 8 ? Fault::stop : Fault::pause;
  round.delay = std::chrono::microseconds(up_to(400'000));
  round.seed = random();
  return round;
}

// One operation, synchronous or not; the same on all ranks.
void soak_step(Communicator& comm, std::mt19937_64& random, std::vector<Work>& under_way) {
  const auto up_to = [&](int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); };
  const int n = comm.size();
  const std::int64_t count = up_to(3) == 0 ? 150'000 : 1 + up_to(500);
  const bool async = up_to(2) == 0;
  const int root = up_to(n);
  const auto ones = [](std::int64_t elements) { return at::full({elements}, 1.0F); };
  Work work;
  switch (up_to(9)) {
    case 0:
      work = comm.broadcast(ones(count), {.root = root, .async = async});
      break;
    case 1:
      work = comm.reduce(ones(count), {.root = root, .async = async});
      break;
    case 2:
      work = comm.all_gather(ones(count * n), ones(count), {.async = async});
      break;
    case 3:
      work = comm.reduce_scatter(ones(count), ones(count * n), {.async = async});
      break;
    case 4:
      work = comm.all_to_all(ones(count * n), ones(count * n), {.async = async});
      break;
    case 5: {
      at::Tensor in = ones(count);
      work = comm.batch_isend_irecv(
          {{true, ones(count), (comm.rank() + 1) % n, 1}, {false, in, (comm.rank() + n - 1) % n, 1}}, {.async = async});
      break;
    }
    case 6:
      work = comm.gather(comm.rank() == root ? ones(count * n) : at::Tensor(), ones(count),
                         {.root = root, .async = async});
      break;
    case 7:
      work = comm.barrier({.async = async});
      break;
    default:
      work = comm.all_reduce(ones(count), {.async = async});
      break;
  }
  under_way.push_back(std::move(work));
  if (under_way.size() >= 8) {
    for (const Work& one : under_way) one.wait();
    under_way.clear();
  }
}

std::shared_ptr<Communicator> make_soak_world(const Round& round, const std::shared_ptr<Store>& store, int rank) {
  const CommunicatorOptions options{.heartbeat = kSoakHeartbeat};
  if (round.backend == SoakBackend::shm) return make_shm_communicator(*store, rank, round.size, options);
  auto flat = make_gloo_communicator(store, rank, round.size, {.communicator = options});
  if (round.backend == SoakBackend::gloo) return flat;
  std::vector<int> nodes;
  for (int r = 0; r < round.size; ++r) nodes.push_back(2 * r < round.size ? 0 : 1);
  return make_hierarchical_communicator(std::move(flat), {.communicator = options,
                                                          .nodes = std::move(nodes),
                                                          .hint = std::nullopt,
                                                          .smallest_bytes = 1,
                                                          .by_estimate = false,
                                                          .piece_bytes = 100'000});
}

void play(const Round& round, const HostPort& server, FaultRank& self) {
  const bool survives = round.fault == Fault::pause;
  self.arrive();
  try {
    auto store = std::make_shared<PrefixStore>(std::make_shared<TcpStore>(server), fmt::format("{}", round.number));
    const auto comm = make_soak_world(round, store, self.rank());
    self.arrive();
    std::mt19937_64 random(round.seed);
    std::vector<Work> under_way;
    for (;;) {
      soak_step(*comm, random, under_way);
      // After a pause the ranks agree to end.
      if (!survives) continue;
      at::Tensor done = at::full({1}, self.is_told(1) ? 1.0F : 0.0F);
      comm->all_reduce(done, {.op = ReduceOp::min});
      if (done.const_data_ptr<float>()[0] == 1.0F) break;
    }
    for (const Work& work : under_way) work.wait();
  } catch (const CommError& e) {
    const std::string text = e.what();
    if (survives) throw std::runtime_error("a pause was taken for a failure: " + text);
    if (self.rank() == round.victim) return;  // stopped and continued
    self.require_in_time(round.fault == Fault::kill ? 1000ms : kSoakHeartbeat, text);
    const std::string who = fmt::format("rank {} ", round.victim);
    if (text.find(who + (round.fault == Fault::kill ? "has died" : "is stopped")) == std::string::npos)
      throw std::runtime_error("the error does not name the culprit: " + text);
  }
}

// The inodes of the shared segments that a process has mapped.
std::set<std::string> segments_of(const std::string& process) {
  std::set<std::string> found;
  std::ifstream maps("/proc/" + process + "/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:phalanx") == std::string::npos) continue;
    std::istringstream fields(line);
    std::string range, mode, offset, device, inode;
    fields >> range >> mode >> offset >> device >> inode;
    found.insert(device + " " + inode);
  }
  return found;
}

// Only names of ours: other programs create and remove files too.
std::set<std::string> names_in_dev_shm() {
  std::set<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", none))
    if (entry.path().filename().string().find("phalanx") != std::string::npos) names.insert(entry.path().string());
  return names;
}

// The processes that still map one of the segments.
std::string holders_of(const std::set<std::string>& segments) {
  std::string holders;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    for (const std::string& segment : segments_of(name))
      if (segments.contains(segment)) holders += fmt::format("process {} still maps {}\n", name, segment);
  }
  return holders;
}

// Orphans of its children become children of this process too.
std::set<std::string> children_of_this_process() {
  std::set<std::string> children;
  const std::string line_of_child = fmt::format("PPid:\t{}", getpid());
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream status(entry.path() / "status");
    for (std::string line; std::getline(status, line);)
      if (line == line_of_child) children.insert(name);
  }
  return children;
}

struct Findings {
  std::map<Fault, std::chrono::milliseconds> worst;
  int with_segments = 0;  // faults that hit a world with shared memory
};

// Runs one fault, with separate keys in the store. Returns what was wrong.
std::string endure(const Round& round, const HostPort& server, Findings& findings) {
  TcpStore store(server);
  std::set<std::string> segments;
  std::string failures;
  const auto children_before = children_of_this_process();
  FaultWorld world(round.size, [&](FaultRank& self) { play(round, server, self); });
  const std::string victim = std::to_string(world.processes()[static_cast<std::size_t>(round.victim)]);
  // A rank that ends or stops before it has joined the rendezvous counts as late, not as dead or stopped.
  store.get(round.backend == SoakBackend::shm ? fmt::format("{}/shm/world/1/0/{}", round.number, round.victim)
                                              : fmt::format("{}/gloo/1/world/rank/{}", round.number, round.victim),
            60s);
  if (!world.await(round.victim, round.fault == Fault::stop ? 2 : 1)) return "the victim did not come\n";
  // Any moment may show an error: the sleep gives a random time, it does not order anything.
  usleep(static_cast<useconds_t>(round.delay.count()));
  const bool is_made = world.has_arrived(round.victim, 2);
  segments = segments_of(victim);
  if (is_made && segments.empty() && round.backend == SoakBackend::shm)
    failures += "the victim has no segment of shared memory, so the test looks for the wrong thing\n";
  if (!segments.empty()) ++findings.with_segments;
  world.strike(round.victim, round.fault == Fault::kill ? SIGKILL : SIGSTOP);
  for (int rank = 0; rank < round.size && round.fault == Fault::stop; ++rank)
    if (rank != round.victim && !world.await_end(rank)) failures += fmt::format("rank {} hangs\n", rank);
  const auto struck = std::chrono::steady_clock::now();
  if (round.fault == Fault::pause) usleep(static_cast<useconds_t>(round.delay.count() / 2));
  world.go(1);
  if (round.fault != Fault::kill) world.send(round.victim, SIGCONT);
  // If the node was suspended, the pause was not short.
  const bool was_short = std::chrono::steady_clock::now() - struck < round.delay / 2 + kSoakHeartbeat / 4;
  failures += world.finish();
  if (round.fault == Fault::pause && !was_short && !failures.empty()) {
    std::replace(failures.begin(), failures.end(), '\n', ' ');
    failures = "late: the pause was a long one: " + failures + "\n";
  }
  auto& worst = findings.worst[round.fault];
  worst = std::max(worst, world.worst());
  // Check before the world is destroyed, which kills the remaining processes.
  for (const std::string& child : children_of_this_process())
    if (!children_before.contains(child)) failures += fmt::format("process {} is still there\n", child);
  return failures + holders_of(segments);
}

TEST(FaultSoak, RandomKillsStopsAndRestarts) {
  const auto faults = env_int("PHALANX_SOAK_FAULTS", {.min = 1, .max = 100'000}).value_or(12);
  const auto seed = static_cast<std::uint64_t>(
      env_int("PHALANX_SOAK_SEED", {.min = 0})
          .value_or(faults > 12 ? std::chrono::system_clock::now().time_since_epoch().count() % 1'000'000 : 1));
  fmt::print("soak: {} faults, PHALANX_SOAK_SEED={}\n", faults, seed);
  std::mt19937_64 random(seed);
  const auto shm_before = names_in_dev_shm();
  TcpStoreServer server;
  std::map<std::string, int> counts;
  Findings findings;
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // orphans come to this process
  int next_number = 0;               // a repeated fault gets new keys
  for (int fault = 0; fault < faults; ++fault) {
    Round round = draw(random, fault);
    SCOPED_TRACE(round.text());
    ASSERT_EQ(again_if_late([&] {
                round.number = next_number++;
                return endure(round, server.address(), findings);
              }),
              "");
    ++counts[fmt::format("{} {}", name_of(round.backend),
                         round.fault == Fault::kill   ? "killed"
                         : round.fault == Fault::stop ? "stopped"
                                                      : "paused")];
  }
  prctl(PR_SET_CHILD_SUBREAPER, 0);
  EXPECT_EQ(names_in_dev_shm(), shm_before);
  EXPECT_GT(findings.with_segments, 0) << "no world had shared memory when it was hit";
  for (const auto& [what, count] : counts) fmt::print("soak: {}: {}\n", what, count);
  fmt::print("soak: slowest error {} ms after a kill, {} ms after a stop (heartbeat {} ms)\n",
             findings.worst[Fault::kill].count(), findings.worst[Fault::stop].count(), kSoakHeartbeat.count());
}

}  // namespace
}  // namespace phalanx
