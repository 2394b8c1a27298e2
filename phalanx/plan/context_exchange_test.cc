// The choice of what attention exchanges, and the counts behind it.
#include "phalanx/plan/context_exchange.h"

#include <gtest/gtest.h>

#include "phalanx/base/testing/matchers.h"

namespace phalanx::plan::context_exchange_test {
namespace {

ContextWork work_of(std::int64_t cp, std::int64_t seq, std::int64_t heads = 32, std::int64_t kv_heads = 8) {
  return {.model = {.dim = 4096, .n_layers = 2, .n_heads = heads, .n_kv_heads = kv_heads}, .cp = cp, .seq = seq};
}

TEST(ContextExchange, CountsTheTransfersOfARing) {
  EXPECT_EQ(ring_transfers(1, 48, 0), 0);
  EXPECT_EQ(ring_transfers(2, 48, 0), 2 + 1);
  EXPECT_EQ(ring_transfers(4, 48, 0), 4 * 3 + (0 + 1 + 2 + 3));
  EXPECT_EQ(ring_transfers(4, 48, 6), 3 + 3);  // each piece is seen by the next one; two of them are the same rank's
  EXPECT_EQ(ring_transfers(4, 48, 1), 0);      // a query sees its own key alone
  // In a window of two pieces the head of rank 3 must go round to rank 2.
  EXPECT_EQ(ring_transfers(4, 48, 8), (2 + 2 + 1 + 3) + (0 + 1 + 2 + 2));
}

TEST(ContextExchange, TakesARingWhereComputingHidesIt) {
  const ContextExchangeChoice choice = choose_context_exchange(work_of(4, 65536));
  EXPECT_EQ(choice.name, "ring");
  EXPECT_THAT(choice.reason, HasSubstr("(100% of it while attention is computed)"));
}

TEST(ContextExchange, TakesWhatSendsLeastWhereItDoesNot) {
  // Few heads of keys are less than the queries that an exchange of heads sends, too. In float32 a ring sends more.
  ContextWork wide = work_of(2, 64);
  wide.number_bytes = 4;
  EXPECT_EQ(choose_context_exchange(wide).name, "keys");
  EXPECT_EQ(choose_context_exchange(work_of(8, 64)).name, "heads");
  const ContextExchangeChoice odd = choose_context_exchange(work_of(8, 64, 20, 20));
  EXPECT_NE(odd.name, "heads");
  EXPECT_THAT(odd.reason, HasSubstr("heads cannot be dealt out (20 and 20 key heads)"));
}

TEST(ContextExchange, KnowsWindowsDocumentsAndSeveralNodes) {
  // A narrow window leaves little to compute, and spares most transfers.
  ContextWork windowed = work_of(4, 65536);
  windowed.model.sliding_window = 512;
  EXPECT_EQ(choose_context_exchange(windowed).name, "ring");
  ContextWork narrow = work_of(2, 64);
  narrow.number_bytes = 4;
  EXPECT_EQ(choose_context_exchange(narrow).name, "keys");
  narrow.model.sliding_window = 2;
  EXPECT_EQ(choose_context_exchange(narrow).name, "ring");
  narrow.model.full_layers = {1};  // one layer sees all
  EXPECT_EQ(choose_context_exchange(narrow).name, "keys");
  ContextWork packed = work_of(4, 65536);
  packed.has_documents = true;
  EXPECT_EQ(choose_context_exchange(packed).name, "heads");
  EXPECT_THAT(choose_context_exchange(packed).reason, HasSubstr("the same work with packed documents"));
  packed.model.n_heads = packed.model.n_kv_heads = 6;
  EXPECT_EQ(choose_context_exchange(packed).name, "ring");
  packed.balances_keys = true;  // now a ring would be the only one with unequal work
  EXPECT_EQ(choose_context_exchange(packed).name, "keys");
  EXPECT_THAT(choose_context_exchange(packed).reason, StartsWith("keys give each rank the same work with packed"));
  packed = work_of(2, 65536);
  packed.has_documents = packed.balances_keys = true;
  EXPECT_EQ(choose_context_exchange(packed).name, "keys");  // with two ranks less to send than heads
  EXPECT_THAT(choose_context_exchange(packed).reason, StartsWith("heads and keys give each rank the same work"));
  packed.cp = 8;
  EXPECT_EQ(choose_context_exchange(packed).name, "heads");
  // Between nodes less is hidden.
  EXPECT_THAT(choose_context_exchange(work_of(16, 16384)).reason, Not(HasSubstr("(100% of it")));
}

}  // namespace
}  // namespace phalanx::plan::context_exchange_test
