#include "phalanx/comm/testing/fault_world.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/under_sanitizer.h"
#include "phalanx/comm/futex.h"
#include "phalanx/comm/testing/fork_gate.h"
#include "phalanx/comm/testing/forked_ranks.h"

namespace phalanx {
namespace {
constexpr std::int64_t kCrowdedUs = 500'000;
}  // namespace

struct FaultPage {
  static constexpr int kMaxRanks = 16;
  std::atomic<std::int64_t> fault_us;             // steady clock; 0: none yet
  std::atomic<std::int64_t> crowded_us;           // at that time; -1: unknown
  std::atomic<std::int64_t> crowded_at_begin_us;  // of the world
  std::atomic<std::int64_t> worst_us;
  std::atomic<std::uint32_t> arrivals;  // of all ranks; a futex word
  std::atomic<std::uint32_t> go;        // a futex word
  std::array<std::atomic<std::uint32_t>, kMaxRanks> arrived;
  std::array<char, 256> text;
  std::array<std::array<char, 4096>, kMaxRanks> errors;
};

namespace {

constexpr std::chrono::seconds kHang{60 * kSlowdown};
constexpr int kHopeless = 10;  // times the bound: too late on any node

std::int64_t to_us(std::chrono::steady_clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::microseconds>(at.time_since_epoch()).count();
}

}  // namespace

LoadedTime LoadedTime::now() {
  LoadedTime now{std::chrono::steady_clock::now(), std::nullopt};
  // "some avg10=0.00 avg60=0.00 avg300=0.00 total=12345": total is the time in microseconds in which a task waited for
  // a core.
  std::ifstream file("/proc/pressure/cpu");
  for (std::string word; file >> word && word != "full";)
    if (word.starts_with("total=")) now.crowded = std::chrono::microseconds(std::stoll(word.substr(6)));
  return now;
}

std::string late(const LoadedTime& since, std::chrono::milliseconds bound, std::chrono::milliseconds* took) {
  bound *= kSlowdown;
  const LoadedTime now = LoadedTime::now();
  const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(now.at - since.at);
  if (took) *took = passed;
  const bool knows = now.crowded && since.crowded;
  const auto crowded = std::chrono::duration_cast<std::chrono::milliseconds>(knows ? *now.crowded - *since.crowded
                                                                                   : std::chrono::microseconds{});
  if (passed <= kHopeless * bound && (!knows || passed - crowded <= bound)) return {};
  return fmt::format("{} ms after the fault, {} ms of them with a machine short of cores; the bound is {} ms",
                     passed.count(), knows ? std::to_string(crowded.count()) : "?", bound.count());
}

void FaultRank::arrive() {
  page_->arrived[static_cast<std::size_t>(rank_)].fetch_add(1);
  page_->arrivals.fetch_add(1);
  futex_wake_all(&page_->arrivals, true);
}

void FaultRank::await_go(int number) {
  for (;;) {
    const std::uint32_t seen = page_->go.load();
    if (seen >= static_cast<std::uint32_t>(number)) return;
    futex_wait(&page_->go, seen, std::chrono::seconds(1), true);
  }
}

bool FaultRank::is_told(int number) const { return page_->go.load() >= static_cast<std::uint32_t>(number); }

LoadedTime FaultRank::fault() const {
  LoadedTime time{std::chrono::steady_clock::time_point(std::chrono::microseconds(page_->fault_us.load())),
                  std::nullopt};
  if (page_->crowded_us.load() >= 0) time.crowded = std::chrono::microseconds(page_->crowded_us.load());
  return time;
}

void FaultRank::require_in_time(std::chrono::milliseconds bound, const std::string& what) {
  if (page_->fault_us.load() == 0) {
    // A rank that waits for a processor may seem lost.
    const auto crowded = LoadedTime::now().crowded;
    const bool is_crowded = !crowded || crowded->count() - page_->crowded_at_begin_us.load() > kCrowdedUs;
    throw std::runtime_error(fmt::format("{}an error before the fault: {}", is_crowded ? "late: " : "", what));
  }
  std::chrono::milliseconds took{};
  const std::string how_late = late(fault(), bound, &took);
  std::int64_t worst = page_->worst_us.load();
  while (took.count() * 1000 > worst && !page_->worst_us.compare_exchange_weak(worst, took.count() * 1000)) {
  }
  if (!how_late.empty()) throw std::runtime_error(fmt::format("late: {}: {}", how_late, what));
}

std::string FaultRank::shared_text() const { return page_->text.data(); }
void FaultRank::set_shared_text(const std::string& text) {
  std::strncpy(page_->text.data(), text.c_str(), page_->text.size() - 1);
}

namespace fault_detail {
void require_quick_end(const LoadedTime& begin) {
  // 0.3 s for a message to the store, 0.2 s for what gloo has under way to a stopped rank.
  if (const std::string how_late = late(begin, std::chrono::milliseconds(1'000)); !how_late.empty())
    throw std::runtime_error("late: leaving: " + how_late);
}
}  // namespace fault_detail

FaultWorld::FaultWorld(int size, const std::function<void(FaultRank&)>& body)
    : statuses_(static_cast<std::size_t>(size), -1), killed_(static_cast<std::size_t>(size), false) {
  page_ = static_cast<FaultPage*>(
      mmap(nullptr, sizeof(FaultPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  page_->crowded_us = -1;
  page_->crowded_at_begin_us = LoadedTime::now().crowded.value_or(std::chrono::microseconds(0)).count();
  ForkGate gate;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = gate.fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // no rank outlives the test
      begin_forked_child();
      int status = 0;
      try {
        FaultRank self(page_, rank);
        body(self);
      } catch (const std::exception& e) {
        std::strncpy(page_->errors[static_cast<std::size_t>(rank)].data(), e.what(), 4095);
        status = 1;
      }
      _exit(status);
    }
    children_.push_back(child);
  }
  gate.open();
}

FaultWorld::~FaultWorld() {
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    if (statuses_[rank] >= 0) continue;
    kill(children_[rank], SIGKILL);
    reap(static_cast<int>(rank), true);
  }
  munmap(page_, sizeof(FaultPage));
}

// True if the rank has ended.
bool FaultWorld::reap(int rank, bool wait) {
  int& status = statuses_[static_cast<std::size_t>(rank)];
  if (status >= 0) return true;
  int told = 0;
  if (waitpid(children_[static_cast<std::size_t>(rank)], &told, wait ? 0 : WNOHANG) <= 0) return false;
  status = told;
  return true;
}

bool FaultWorld::await(int rank, int arrivals) {
  const auto limit = std::chrono::steady_clock::now() + kHang;
  while (std::chrono::steady_clock::now() < limit) {
    const std::uint32_t seen = page_->arrivals.load();
    if (has_arrived(rank, arrivals)) return true;
    if (reap(rank, false)) return true;
    futex_wait(&page_->arrivals, seen, std::chrono::milliseconds(100), true);
  }
  return false;
}

bool FaultWorld::has_arrived(int rank, int arrivals) const {
  return page_->arrived[static_cast<std::size_t>(rank)].load() >= static_cast<std::uint32_t>(arrivals);
}

void FaultWorld::go(int number) {
  page_->go.store(static_cast<std::uint32_t>(number));
  futex_wake_all(&page_->go, true);
}

void FaultWorld::note_fault() {
  if (page_->fault_us.load() != 0) return;
  const LoadedTime now = LoadedTime::now();
  page_->crowded_us.store(now.crowded ? now.crowded->count() : -1);
  page_->fault_us.store(to_us(now.at));
}

void FaultWorld::strike(int rank, int signal) {
  note_fault();
  if (signal == SIGKILL) killed_[static_cast<std::size_t>(rank)] = true;
  send(rank, signal);
}

void FaultWorld::send(int rank, int signal) {
  if (!reap(rank, false)) kill(children_[static_cast<std::size_t>(rank)], signal);
}

bool FaultWorld::await_end(int rank) {
  const auto limit = std::chrono::steady_clock::now() + kHang;
  // There is no futex for the end of a child, so poll for it.
  while (!reap(rank, false)) {
    if (std::chrono::steady_clock::now() > limit) return false;
    usleep(2000);
  }
  return true;
}

std::string FaultWorld::finish() {
  for (int rank = 0; rank < static_cast<int>(children_.size()); ++rank)
    if (!await_end(rank)) break;
  std::string failures;
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    const int status = statuses_[rank];
    if (status < 0)
      failures += fmt::format("rank {}: hangs\n", rank);
    else if (killed_[rank] ? !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
                           : !(WIFEXITED(status) && WEXITSTATUS(status) == 0))
      failures += WIFSIGNALED(status)
                      ? fmt::format("rank {}: signal {}\n", rank, WTERMSIG(status))
                      : fmt::format("rank {}: exit {}: {}\n", rank, WEXITSTATUS(status), page_->errors[rank].data());
  }
  return failures;
}

std::string kill_one_of(int size, int victim, const std::function<std::function<void()>(FaultRank&)>& prepare) {
  FaultWorld world(size, [&](FaultRank& self) {
    const std::function<void()> survive = prepare(self);
    self.arrive();
    while (self.rank() == victim) pause();
    survive();
  });
  std::string failures;
  for (int rank = 0; rank < size; ++rank)
    if (!world.await(rank, 1)) failures += fmt::format("rank {} did not come\n", rank);
  world.strike(victim, SIGKILL);
  return failures + world.finish();
}

std::chrono::milliseconds FaultWorld::worst() const { return std::chrono::milliseconds(page_->worst_us.load() / 1000); }

}  // namespace phalanx
