#include "phalanx/comm/signature.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

std::uint64_t hash_counts(const std::vector<std::int64_t>& counts) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (std::int64_t count : counts) {
    hash ^= static_cast<std::uint64_t>(count);
    hash *= 0x100000001b3ULL;
    hash ^= hash >> 29;
  }
  return hash;
}

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

}  // namespace

bool reduces(Verb verb) { return verb == Verb::all_reduce || verb == Verb::reduce || verb == Verb::reduce_scatter; }
bool is_rooted(Verb verb) {
  return verb == Verb::broadcast || verb == Verb::reduce || verb == Verb::gather || verb == Verb::scatter;
}

Signature signature_of(const OperationDescription& d) {
  if (d.stands_for != nullptr) return *d.stands_for;
  Signature s;
  s.sequence = d.sequence;
  s.verb = d.verb;
  s.dtype = d.dtype;
  if (reduces(d.verb)) s.op = d.op;
  if (is_rooted(d.verb)) s.root = d.root;
  if (!d.counts.empty() || !d.input_counts.empty()) s.uneven = 1;
  switch (d.verb) {
    case Verb::all_gather:
      s.count = s.uneven ? d.output_count : d.input_count;
      s.counts_hash = s.uneven ? hash_counts(d.counts) : 0;
      break;
    case Verb::reduce_scatter:
      s.count = s.uneven ? d.input_count : d.output_count;
      s.counts_hash = s.uneven ? hash_counts(d.counts) : 0;
      break;
    case Verb::gather:
      s.count = d.input_count;
      break;
    case Verb::all_to_all:
      s.count = s.uneven ? 0 : d.input_count;
      break;
    default:
      s.count = d.output_count;
      break;
  }
  return s;
}

std::string describe(const Signature& s) {
  if (s.verb == Verb::barrier) return "barrier()";
  std::string text = fmt::format("{}({}", name_of(s.verb), name_of(s.dtype));
  if (s.verb == Verb::all_to_all && s.uneven)
    text += "[uneven]";
  else
    text += fmt::format("[{}]", s.count);
  if (s.uneven && s.verb != Verb::all_to_all) text += fmt::format(", counts {:08x}", s.counts_hash & 0xffffffffU);
  if (reduces(s.verb)) text += fmt::format(", {}", name_of(s.op));
  if (is_rooted(s.verb)) text += fmt::format(", root {}", s.root);
  return text + ")";
}

std::string describe(const OperationDescription& d) {
  if (d.transfers.empty() && d.verb != Verb::batch_isend_irecv) return describe(signature_of(d));
  const auto one = [](const Transfer& t) {
    return fmt::format("{}[{}] {} rank {}, tag {}", name_of(t.dtype), t.count, t.is_send ? "to" : "from", t.peer,
                       t.tag);
  };
  if (d.verb != Verb::batch_isend_irecv) return fmt::format("{}({})", name_of(d.verb), one(d.transfers.front()));
  std::string text = fmt::format("{}({} transfers", name_of(d.verb), d.transfers.size());
  for (std::size_t i = 0; i < std::min<std::size_t>(d.transfers.size(), 4); ++i)
    text += fmt::format("; {}", one(d.transfers[i]));
  return text + (d.transfers.size() > 4 ? "; ...)" : ")");
}

void require_equal_signatures(std::span<const Signature> signatures) {
  if (std::ranges::all_of(signatures, [&](const Signature& s) { return s == signatures.front(); })) return;
  // Equal calls are listed together, in the order of their first rank.
  std::vector<std::pair<std::string, std::vector<int>>> calls;
  for (std::size_t rank = 0; rank < signatures.size(); ++rank) {
    std::string text = describe(signatures[rank]);
    if (signatures[rank].sequence != signatures.front().sequence)
      text += fmt::format(" as op {}", signatures[rank].sequence);
    auto found = std::ranges::find(calls, text, &std::pair<std::string, std::vector<int>>::first);
    if (found == calls.end()) found = calls.emplace(calls.end(), std::move(text), std::vector<int>());
    found->second.push_back(static_cast<int>(rank));
  }
  std::vector<std::string> parts;
  for (const auto& [text, ranks] : calls) parts.push_back(fmt::format("{}: {}", ranks_text(ranks), text));
  throw CommError(fmt::format("the ranks do not call the same operation: {}", fmt::join(parts, "; ")));
}

}  // namespace phalanx
