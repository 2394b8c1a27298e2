// Signature: what the ranks compare before data moves. It has 32 bytes, so it fits into a message or slot header.
//
// Every rank compares all signatures with its own. So all ranks see a mismatch and report it in the same words:
//
//   op 12 does not match: rank 0, 2: all_reduce(float32[4096], sum); rank 1: all_reduce(float64[2048], sum)
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "phalanx/comm/backend.h"

namespace phalanx {

struct Signature {
  std::uint64_t sequence = 0;
  std::int64_t count = 0;         // elements: of the whole tensor, or of one even part
  std::uint64_t counts_hash = 0;  // of `counts`, for uneven forms whose counts must agree; else 0
  std::int32_t root = 0;          // rooted verbs; else 0
  Verb verb = Verb::barrier;
  DataType dtype = DataType::u8;
  ReduceOp op = ReduceOp::sum;
  std::uint8_t uneven = 0;
  bool operator==(const Signature&) const = default;
};
static_assert(sizeof(Signature) == 32);

bool reduces(Verb verb);
bool is_rooted(Verb verb);

/// For collectives. The counts of all_to_all differ between ranks and are not included (count is 0 when uneven).
Signature signature_of(const OperationDescription& description);

/// "all_reduce(float32[4096], sum)", "broadcast(int64[3], root 1)", "send(float32[8] to rank 2, tag 0)".
std::string describe(const OperationDescription& description);
std::string describe(const Signature& signature);

/// signatures[r] is rank r's. Throws CommError with the text above unless all are equal.
void require_equal_signatures(std::span<const Signature> signatures);

}  // namespace phalanx
