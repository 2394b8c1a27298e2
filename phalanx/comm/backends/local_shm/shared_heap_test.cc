// The shared heap: as a heap, under tensors, across fork(), and as the memory that collectives read and write.
#include "phalanx/comm/backends/local_shm/shared_heap.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/under_sanitizer.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/shared_tensors.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/fault_world.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/comm/testing/verb_places.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMiB = std::size_t{1} << 20;

// A heap exists until its process ends, so each test runs in separate processes.
std::string run_alone(const std::function<void()>& body) {
  return run_forked_ranks(1, [&](int) { body(); });
}

std::string run_heap_ranks(
    int world, const std::function<void(Communicator&)>& body,
    const std::function<bool(int rank)>& has_heap = [](int) { return true; }) {
  TcpStoreServer server;
  return run_forked_ranks(world, [&](int rank) {
    if (has_heap(rank)) share_large_tensors();
    TcpStore store(server.address());
    body(*make_shm_communicator(store, rank, world));
  });
}

bool is_shared(const at::Tensor& tensor) { return SharedHeap::owner_of(tensor.const_data_ptr()) != nullptr; }

int descriptor_of(const SharedHeap& heap) {
  int pid = 0, descriptor = -1;
  std::istringstream(heap.address()) >> pid >> descriptor;
  return descriptor;
}

std::size_t bytes_with_pages(const SharedHeap& heap) {
  struct stat status {};
  must_be(fstat(descriptor_of(heap), &status) == 0, "fstat");
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

TEST(SharedHeap, BlocksAreApartAndKeepWhatIsInThem) {
  EXPECT_EQ(run_alone([] {
              SharedHeap::start({.reserved_bytes = 64 * kMiB, .cached_bytes = 4 * kMiB});
              SharedHeap& heap = *SharedHeap::current();
              struct Taken {
                unsigned char* data;
                std::size_t bytes;
                unsigned char value;
              };
              std::vector<Taken> all;
              std::mt19937 random(1);
              std::size_t refused = 0;
              const auto give_one = [&] {
                const std::size_t k = random() % all.size();
                const Taken one = all[k];
                for (const std::size_t at : {std::size_t{0}, one.bytes / 2, one.bytes - 1})
                  must_be(one.data[at] == one.value, fmt::format("byte {} of {}", at, one.bytes));
                must_be(heap.free(one.data).tag == one.value, "the tag");
                all[k] = all.back();
                all.pop_back();
              };
              for (int step = 0; step < 20'000; ++step) {
                // Alternates between more allocations and more frees, so the heap is full and nearly empty several
                // times.
                if (!all.empty() && random() % 100 < (step / 2'000 % 2 == 0 ? 40U : 60U)) {
                  give_one();
                  continue;
                }
                const std::size_t bytes = SharedHeap::kLeastBytes + random() % (step % 50 == 0 ? 4 * kMiB : kMiB / 4);
                const auto value = static_cast<unsigned char>(random());
                auto* data = static_cast<unsigned char*>(SharedHeap::try_allocate(bytes, value));
                if (data == nullptr) {
                  ++refused;
                  continue;
                }
                must_be(reinterpret_cast<std::uintptr_t>(data) % 4096 == 0, "at a page");
                must_be(heap.at(data).bytes >= bytes && heap.at(data).bytes < bytes + 4096, "its size");
                must_be(heap.offset_of(data, bytes) ==
                            static_cast<std::size_t>(data - reinterpret_cast<unsigned char*>(heap.base())),
                        "its offset");
                std::memset(data, value, bytes);
                all.push_back({data, bytes, value});
                std::size_t in_use = 0;
                for (const Taken& one : all) in_use += heap.at(one.data).bytes;
                must_be(heap.use().in_use == in_use, fmt::format("{} bytes in use", heap.use().in_use));
                must_be(bytes_with_pages(heap) <= in_use + 4096 + 5 * kMiB, "pages are not given back");
              }
              must_be(refused > 100, fmt::format("{} times full", refused));
              while (!all.empty()) give_one();
              must_be(heap.use().in_use == 0, "nothing is left");
              must_be(bytes_with_pages(heap) <= 5 * kMiB, "pages are kept");
              // Free blocks are merged: the heap is one block again.
              must_be(SharedHeap::try_allocate(63 * kMiB) != nullptr, "in one piece");
              must_be(SharedHeap::try_allocate(63 * kMiB) == nullptr, "a second one");
            }),
            "");
}

TEST(SharedHeap, PagesOfFreedBlocksStayForTheNextUpToALimit) {
  EXPECT_EQ(run_alone([] {
              SharedHeap::start({.cached_bytes = 8 * kMiB});
              SharedHeap& heap = *SharedHeap::current();
              const auto use = [&](std::size_t bytes) {
                void* const block = SharedHeap::try_allocate(bytes);
                std::memset(block, 1, bytes);
                heap.free(block);
                return bytes_with_pages(heap) - 4096;
              };
              must_be(use(6 * kMiB) == 6 * kMiB, "kept");
              must_be(use(7 * kMiB) == 7 * kMiB, "the same pages again");
              must_be(use(20 * kMiB) <= 4 * kMiB, "given back");
              must_be(heap.use().cached == bytes_with_pages(heap) - 4096, "what is kept");
            }),
            "");
}

TEST(SharedHeap, HoldsLargeTensorsHoweverTheyAreMade) {
  EXPECT_EQ(run_alone([] {
              const at::Tensor before = at::ones({1 << 20});
              share_large_tensors();
              share_large_tensors();
              must_be(!is_shared(before), "made before");
              must_be(is_shared(at::ones({1 << 20})) && is_shared(before.add(1)) && is_shared(before.clone()), "large");
              must_be(!is_shared(at::ones({100})), "small");
              {
                const SharedHeap::Pause pause;
                must_be(!is_shared(at::ones({1 << 20})), "during a pause");
                std::jthread([] { must_be(is_shared(at::ones({1 << 20})), "of another thread"); });
              }
              SharedHeap& heap = *SharedHeap::current();
              must_be(heap.use().in_use == 0, "freed");
              at::Tensor grown = at::ones({100});
              grown.resize_({100'000});
              must_be(is_shared(grown) && grown[99].item<float>() == 1.0F, "grown");
              std::jthread([&] { grown.reset(); }).join();
              c10::Allocator& allocator = *c10::GetCPUAllocator();
              for (const std::size_t bytes : {std::size_t{100}, kMiB}) {
                void* const raw = allocator.raw_allocate(bytes);
                std::memset(raw, 1, bytes);
                allocator.raw_deallocate(raw);
              }
              must_be(heap.use().in_use == 0, "freed by address");
              must_be(allocator.allocate(0).get() == nullptr, "nothing");
            }),
            "");
}

TEST(SharedHeap, WhatFindsNoRoomIsOrdinaryMemory) {
  EXPECT_EQ(run_alone([] {
              share_large_tensors({.reserved_bytes = kMiB});
              const at::Tensor first = at::ones({150'000}), second = at::ones({150'000});
              must_be(is_shared(first) && !is_shared(second), "600 kB each");
              try {
                at::empty({std::int64_t{1} << 50}, at::kByte);
              } catch (const c10::Error&) {
                return;
              }
              throw std::runtime_error("no error");
            }),
            "");
}

TEST(SharedHeap, CannotBeMadeWithoutAddresses) {
  if (kUnderSanitizer) GTEST_SKIP() << kWhyNoMemoryLimit;
  EXPECT_EQ(run_alone([] {
              const rlimit none{std::size_t{8} << 30, std::size_t{8} << 30};
              setrlimit(RLIMIT_AS, &none);
              try {
                share_large_tensors({.reserved_bytes = std::size_t{1} << 40});
              } catch (const CommError& e) {
                must_be(std::string(e.what()).starts_with("the shared heap cannot be made: 1099511627776 bytes: "),
                        e.what());
                must_be(!is_shared(at::ones({1 << 20})), "ordinary");
                return;
              }
              throw std::runtime_error("no error");
            }),
            "");
}

TEST(SharedHeap, IsAsLongAsAFileMayBe) {
  EXPECT_EQ(run_alone([] {
              const rlimit small{kMiB, kMiB};
              setrlimit(RLIMIT_FSIZE, &small);
              share_large_tensors();
              must_be(SharedHeap::current()->bytes() == kMiB, "its length");
              must_be(is_shared(at::ones({10'000})), "a tensor");
            }),
            "");
}

// What the child writes to its tensors does not reach the parent, and its new tensors are its own.
TEST(SharedHeap, AForkedChildHasItsOwnTensors) {
  EXPECT_EQ(run_alone([] {
              share_large_tensors();
              at::Tensor x = at::full({1 << 20}, 1.0F), freed = at::full({1 << 20}, 1.0F);
              const pid_t child = fork();
              if (child == 0) {
                const auto fail_unless = [](bool condition, int code) {
                  if (!condition) _exit(code);
                };
                fail_unless(x[5].item<float>() == 1.0F, 1);
                x.fill_(2);
                fail_unless(x.sum().item<float>() == 2.0F * (1 << 20), 2);
                freed.reset();
                fail_unless(SharedHeap::current() == nullptr, 3);
                fail_unless(!is_shared(at::full({1 << 20}, 3.0F)), 4);
                share_large_tensors();
                const at::Tensor own = at::full({1 << 20}, 4.0F);
                fail_unless(is_shared(own) && SharedHeap::owner_of(own.const_data_ptr()) == SharedHeap::current(), 5);
                x.reset();
                _exit(0);
              }
              int status = -1;
              must_be(waitpid(child, &status, 0) == child && status == 0, fmt::format("the child: {}", status));
              must_be(at::equal(x, at::full({1 << 20}, 1.0F)), "the parent's tensor");
              must_be(at::equal(freed, at::full({1 << 20}, 1.0F)), "the tensor that the child has freed");
            }),
            "");
}

TEST(SharedHeap, AForkedChildWithoutACopyDoesNotWriteToItsParent) {
  EXPECT_EQ(run_alone([] {
              share_large_tensors();
              const at::Tensor x = at::full({1 << 20}, 1.0F);
              close(descriptor_of(*SharedHeap::current()));  // a private mapping of it fails
              ::testing::internal::CaptureStderr();
              const pid_t child = fork();
              if (child == 0) {
                const rlimit none{0, 0};
                setrlimit(RLIMIT_CORE, &none);
                x.fill_(2);
                _exit(0);
              }
              int status = -1;
              must_be(waitpid(child, &status, 0) == child && status != 0, fmt::format("the child: {}", status));
              const std::string told = ::testing::internal::GetCapturedStderr();
              must_be(told.find("gets no copy of the shared heap") != std::string::npos, told);
              must_be(at::equal(x, at::full({1 << 20}, 1.0F)), "the parent's tensor");
            }),
            "");
}

TEST(SharedHeap, IsReachedByItsAddressAndTokenAlone) {
  EXPECT_EQ(run_alone([] {
              SharedHeap::start({.reserved_bytes = kMiB});
              const std::string address = SharedHeap::current()->address();
              must_be(SharedHeap::attach(address).get() == SharedHeap::current()->base(), "its own");
              std::vector<std::string> words;
              std::istringstream text(address);
              for (std::string word; text >> word;) words.push_back(word);
              must_be(words.size() == 5, address);
              for (std::size_t k = 0; k < words.size(); ++k) {
                std::vector<std::string> other = words;
                // A process is found by the ids of its threads, too, and the next id may be one. This one is too large.
                other[k] = std::to_string(std::stoull(words[k]) + (k == 0 ? 1 << 23 : 1));
                must_be(SharedHeap::attach(fmt::format("{}", fmt::join(other, " "))) == nullptr,
                        fmt::format("word {} of {}", k, address));
              }
              must_be(SharedHeap::attach("") == nullptr && SharedHeap::attach("1 2") == nullptr, "no address");
            }),
            "");
}

// --- collectives

using Place = std::function<at::Tensor(std::int64_t elements)>;

void heap_suite(Communicator& comm) {
  for (const c10::ScalarType type : {c10::ScalarType::Float, c10::ScalarType::BFloat16}) {
    const Place shared = [&](std::int64_t n) { return at::empty({n}, at::TensorOptions().dtype(type)); };
    const Place ordinary = [&](std::int64_t n) {
      const SharedHeap::Pause pause;
      return shared(n);
    };
    for (const std::int64_t count : {5, 40'001, 700'003}) {
      if (count > 100'000 && (type != c10::ScalarType::Float || comm.size() > 2)) continue;
      compare_verbs(comm, count, type, "in heaps", shared);
      compare_verbs(comm, count, type, "somewhere in a block",
                    [&](std::int64_t n) { return shared(n + 1000).narrow(0, 7 * comm.rank() + 3, n); });
      if (count > 100'000) continue;
      compare_verbs(comm, count, type, "rank 0 only", comm.rank() == 0 ? shared : ordinary);
      compare_verbs(comm, count, type, "all but rank 0", comm.rank() != 0 ? shared : ordinary);
      const at::Tensor window = comm.symmetric_empty({(count + 100) * comm.size()}, type);
      compare_verbs(comm, count, type, "some in symmetric memory",
                    [&](std::int64_t n) { return comm.rank() % 2 == 0 ? window.narrow(0, 0, n) : shared(n); });
    }
  }
}

TEST(SharedHeapCollectives, GiveTheSameOnEveryVerb) {
  for (const int world : {1, 2, 3, 4}) EXPECT_EQ(run_heap_ranks(world, heap_suite), "") << world << " ranks";
}

TEST(SharedHeapCollectives, PassTheSuiteOfTheBackends) {
  for (const int world : {2, 3, 8})
    EXPECT_EQ(run_heap_ranks(world, [](Communicator& comm) { run_backend_suite(comm); }), "") << world << " ranks";
}

// If one rank has no heap, only speed is lost.
TEST(SharedHeapCollectives, NeedAHeapOnEveryRank) {
  EXPECT_EQ(run_heap_ranks(3, heap_suite, [](int rank) { return rank != 1; }), "");
}

// Like a system that forbids processes to inspect each other.
TEST(SharedHeapCollectives, NeedHeapsThatAllCanReach) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(3,
                             [&](int rank) {
                               share_large_tensors();
                               if (rank == 1) must_be(close(descriptor_of(*SharedHeap::current())) == 0, "close");
                               TcpStore store(server.address());
                               heap_suite(*make_shm_communicator(store, rank, 3));
                             }),
            "");
}

// Kibibytes that this process has touched of its segments, which hold the slots.
std::int64_t segments_kib() {
  std::ifstream maps("/proc/self/smaps");
  std::int64_t sum = 0;
  bool is_segment = false;
  for (std::string line; std::getline(maps, line);) {
    // "7f..-7f.. rw-s 00000000 00:01 12 /memfd:phalanx (deleted)"
    if (line.find(" rw") != std::string::npos) is_segment = line.find("/memfd:phalanx ") != std::string::npos;
    if (is_segment && line.starts_with("Rss:")) sum += std::stoll(line.substr(4));
  }
  return sum;
}

// Also in a group that was split, whose ranks have other numbers.
TEST(SharedHeapCollectives, DoNotGoThroughSlots) {
  EXPECT_EQ(run_heap_ranks(3,
                           [](Communicator& world) {
                             const auto comm = world.split(world.rank() == 0 ? -1 : 0, -world.rank());
                             if (!comm) return;
                             const auto own = static_cast<float>(world.rank());
                             const at::Tensor x = at::full({2'000'000}, own), y = at::empty({4'000'000});
                             const std::int64_t before = segments_kib();
                             comm->all_gather(y, x);
                             must_be(at::equal(y.narrow(0, 0, 2'000'000), at::full({2'000'000}, 2.0F)) &&
                                         at::equal(y.narrow(0, 2'000'000, 2'000'000), at::full({2'000'000}, 1.0F)),
                                     "what rank 2 of the world had, then rank 1");
                             comm->all_reduce(x);
                             must_be(at::equal(x, at::full({2'000'000}, 3.0F)), "the sum");
                             comm->broadcast(x);
                             const std::int64_t direct = segments_kib() - before;
                             must_be(direct < 64, fmt::format("{} KiB of the slots were touched", direct));
                             const SharedHeap::Pause pause;
                             comm->all_reduce(at::full({4'000'000}, 1.0F));  // for comparison
                             const std::int64_t slots = segments_kib() - before;
                             must_be(slots > 1024, fmt::format("{} KiB of the slots, expected more", slots));
                           }),
            "");
}

// The intra-node part of a hierarchical communicator is shm, and uses the heaps in the same way.
TEST(SharedHeapCollectives, ServeTheMachinesOfTwoLevels) {
  constexpr int kRanks = 4;
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(kRanks,
                             [&](int rank) {
                               share_large_tensors();
                               const auto comm = make_hierarchical_communicator(
                                   make_gloo_communicator(std::make_shared<TcpStore>(server.address()), rank, kRanks),
                                   {.nodes = {0, 0, 1, 1}, .hint = std::nullopt, .by_estimate = false});
                               const auto sum = [&] {
                                 const at::Tensor x = at::full({4'000'000}, rank + 1.0F);
                                 comm->all_reduce(x);
                                 must_be(at::equal(x, at::full({4'000'000}, 10.0F)), "the sum");
                               };
                               const std::int64_t before = segments_kib();
                               sum();
                               const std::int64_t direct = segments_kib() - before;
                               const SharedHeap::Pause pause;
                               sum();
                               const std::int64_t slots = segments_kib() - before;  // for comparison
                               must_be(direct < 64 && slots > 1024, fmt::format("{}, then {} KiB", direct, slots));
                             }),
            "");
}

// A rank that was stopped in the middle may continue to write into its peers' tensors later: memory that it can still
// access is never reused for another tensor.
TEST(SharedHeapCollectives, AStoppedRankDoesNotWriteIntoLaterTensors) {
  constexpr int kVictim = 1;
  constexpr std::int64_t kElements = 30'000'000;
  TcpStoreServer server;
  FaultWorld world(3, [&](FaultRank& self) {
    share_large_tensors();
    TcpStore store(server.address());
    const auto comm = make_shm_communicator(store, self.rank(), 3, {.timeout = 2s, .heartbeat = 0s});
    at::Tensor x = at::full({kElements}, 1.0F);
    const void* const place = x.const_data_ptr();
    comm->barrier();
    comm->mark_started();
    if (!outlasts_a_stopped_rank(*comm, x, self.rank() == kVictim)) return;
    x.reset();
    for (int k = 0; k < 3; ++k) {
      const at::Tensor next = at::empty({kElements});
      must_be(is_shared(next) && next.const_data_ptr() != place, "the place of the old tensor");
    }
  });
  for (const int rank : {0, 2}) EXPECT_TRUE(world.await_end(rank)) << "rank " << rank << " hangs";
  world.send(kVictim, SIGCONT);
  EXPECT_EQ(world.finish(), "");
}

}  // namespace
}  // namespace phalanx
