// Collectives through slots, with ranks as threads over one mapping of the memory: so the thread sanitizer sees who
// writes and reads what, and debug builds check the rules of round_operation.h. Small slots make many rounds.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/local_shm/round_operation.h"
#include "phalanx/comm/wait.h"

namespace phalanx {
namespace {

constexpr std::size_t kSmallSlot = 16U << 10;

// Runs body(rank, control block, run) on a thread for each rank. run(description) completes a collective.
template <class Body>
void run_slot_ranks(int size, Body body) {
  const auto nobody_else = [size](const std::string& value) {
    std::vector<std::string> all(static_cast<std::size_t>(size));
    all[0] = value;
    return all;
  };
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  const auto segment = ShmSegment::make({size, kSmallSlot, 64}, members, 0, nobody_else);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      ControlBlock control_block(ShmSegment::control_block(segment), rank, size);
      ShmWindows windows;
      body(rank, [&](const OperationDescription& description) {
        RoundOperation operation(control_block, description, *segment, windows);
        SpinBackoff backoff(SpinBackoff::kOversubscribed);
        while (operation.advance() != Progress::done)
          if (!backoff.step()) backoff.reset();
      });
    });
  for (std::thread& thread : threads) thread.join();
}

using Numbers = std::vector<std::int64_t>;

OperationDescription on_numbers(Verb verb, const Numbers& input, Numbers& output) {
  OperationDescription d;
  d.verb = verb;
  d.dtype = DataType::i64;
  d.input = input.data();
  d.input_count = static_cast<std::int64_t>(input.size());
  d.output = output.data();
  d.output_count = static_cast<std::int64_t>(output.size());
  return d;
}

// Rank r's element i is r * 1,000,000 + i.
Numbers numbers(int rank, std::size_t count) {
  Numbers all(count);
  std::iota(all.begin(), all.end(), rank * std::int64_t{1'000'000});
  return all;
}

class RoundOperationTest : public ::testing::TestWithParam<int> {};

TEST_P(RoundOperationTest, SumsGoThroughSlots) {
  const int size = GetParam();
  for (const std::size_t count : {1UL, 2'000UL, 20'000UL}) {  // one shot, two chunks, many
    run_slot_ranks(size, [&](int rank, auto run) {
      const Numbers nothing;
      const auto sum = [&](std::size_t i) {
        return size * (size - 1) / 2 * std::int64_t{1'000'000} + size * static_cast<std::int64_t>(i);
      };
      for (int call = 0; call < 5; ++call) {
        Numbers x = numbers(rank, count);
        run(on_numbers(Verb::all_reduce, nothing, x));
        for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(x[i], sum(i)) << "element " << i << " of call " << call;
        Numbers part(count);
        run(on_numbers(Verb::reduce_scatter, numbers(rank, count * static_cast<std::size_t>(size)), part));
        for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(part[i], sum(static_cast<std::size_t>(rank) * count + i));
      }
    });
  }
}

TEST_P(RoundOperationTest, PartsGoThroughSlots) {
  const int size = GetParam();
  for (const std::size_t count : {1UL, 20'000UL}) {
    run_slot_ranks(size, [&](int rank, auto run) {
      const Numbers nothing;
      for (int root = 0; root < size; ++root) {
        Numbers whole(count * static_cast<std::size_t>(size));
        run(on_numbers(Verb::all_gather, numbers(rank, count), whole));
        for (std::size_t i = 0; i < whole.size(); ++i)
          ASSERT_EQ(whole[i], static_cast<std::int64_t>(i / count * 1'000'000 + i % count));
        run(on_numbers(Verb::all_to_all, numbers(rank, whole.size()), whole));
        for (std::size_t i = 0; i < whole.size(); ++i)
          ASSERT_EQ(whole[i], static_cast<std::int64_t>(i / count * 1'000'000 + static_cast<std::size_t>(rank) * count +
                                                        i % count));
        Numbers x = numbers(rank, count);
        OperationDescription d = on_numbers(Verb::broadcast, nothing, x);
        d.root = root;
        run(d);
        ASSERT_EQ(x, numbers(root, count));
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, RoundOperationTest, ::testing::Values(2, 3));

}  // namespace
}  // namespace phalanx
