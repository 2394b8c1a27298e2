#include "phalanx/plan/context_exchange.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "phalanx/layout/context_cut.h"
#include "phalanx/plan/bytes_text.h"
#include "phalanx/plan/devices.h"

namespace phalanx::plan {
namespace {

// Operations that a device does in the time in which a link carries one byte: an H100 in 16 bits beside NVLink, and
// beside a 400 Gbit/s adapter.
constexpr double kOperationsPerByte = 2000, kOperationsPerByteBetweenNodes = 8000;

struct Cost {
  std::string name;
  double sent = 0;    // bytes of a rank, one layer and step
  double hidden = 0;  // the share of them that computing hides
  double left() const { return sent * (1 - hidden); }
};

}  // namespace

std::int64_t window_of_all_layers(const models::LlamaConfig& model) {
  return model.full_layers.empty() ? model.sliding_window : 0;
}

std::int64_t ring_transfers(std::int64_t cp, std::int64_t seq, std::int64_t window) {
  const std::int64_t piece = std::max<std::int64_t>(ContextCut{.ranks = cp}.padded(seq) / (2 * cp), 1);
  const std::int64_t pieces = window > 0 ? (window - 1 + piece - 1) / piece : 2 * cp;  // after its own that see a key
  std::int64_t sum = 0;
  for (std::int64_t owner = 0; owner < cp; ++owner) {
    const std::int64_t last = std::min(owner + pieces, 2 * cp - 1);  // the last piece that sees the head
    sum += last >= 2 * cp - owner ? cp - 1 : std::min(last, cp - 1) - owner;
    sum += std::min(pieces, owner);
  }
  return sum;
}

ContextExchangeChoice choose_context_exchange(const ContextWork& work) {
  const std::int64_t n = work.cp, heads = work.model.n_heads / work.tp,
                     kv_heads = std::max<std::int64_t>(work.model.n_kv_heads / work.tp, 1);
  const std::int64_t window = window_of_all_layers(work.model);
  const auto dim = static_cast<double>(work.model.head_dim());
  const auto ranks = static_cast<double>(n), bytes = static_cast<double>(work.number_bytes);
  const double local = static_cast<double>(work.batch * work.seq) / ranks;  // tokens of a rank
  const double keys = 2 * static_cast<double>(kv_heads) * dim;              // and values, of a token
  const double queries = static_cast<double>(heads) * dim;

  std::vector<Cost> costs;
  const bool can_deal_out = deals_out_heads(heads, kv_heads, n);
  if (can_deal_out) {
    const double all = 2 * queries + 2 * static_cast<double>(std::max(kv_heads, n)) * dim;
    costs.push_back({.name = "heads", .sent = 2 * (ranks - 1) / ranks * local * all * bytes});
  }
  // Keys and values travel in both passes, their gradients in one.
  const double pieces = static_cast<double>(ring_transfers(n, work.seq, window)) / ranks / 2;
  Cost ring{.name = "ring", .sent = pieces * local * keys * (2 * bytes + 4)};
  const auto length = static_cast<double>(work.seq);
  double seen = window > 0 ? std::min(static_cast<double>(window), length / 2) : length / 2;  // keys of a query
  if (work.has_documents) seen /= 4;
  // Two products forward and five backward, a multiplication and an addition each.
  const double operations = 2 * 7 * local * seen * queries;
  const bool is_on_one_node = n * work.tp <= kUsualPerNode;
  const double rate = is_on_one_node ? kOperationsPerByte : kOperationsPerByteBetweenNodes;
  ring.hidden = ring.sent > 0 ? std::min(1.0, operations / rate / ring.sent) : 1;
  costs.push_back(ring);
  costs.push_back({.name = "keys", .sent = (ranks - 1) * local * keys * (bytes + 4)});

  // Where documents are packed, whole sequences give all ranks the same work, and so does a cut by work.
  std::vector<Cost> even;
  std::vector<std::string> names;
  for (const Cost& cost : costs) {
    if (!work.has_documents || cost.name == "ring" || (cost.name == "keys" && !work.balances_keys)) continue;
    even.push_back(cost);
    names.push_back(cost.name);
  }
  const Cost best = *std::ranges::min_element(even.empty() ? costs : even, {}, &Cost::left);
  std::vector<std::string> parts;
  for (const Cost& cost : costs) {
    const std::string hidden =
        cost.name == "ring" ? fmt::format(" ({:.0f}% of it while attention is computed)", 100 * cost.hidden) : "";
    parts.push_back(fmt::format("{} {}{}", cost.name, bytes_text(static_cast<std::int64_t>(cost.sent)), hidden));
  }
  if (!can_deal_out) parts.push_back(fmt::format("heads cannot be dealt out ({} and {} key heads)", heads, kv_heads));
  return {.name = best.name,
          .reason = fmt::format("{}a rank would send in a layer and step: {}",
                                even.empty() ? ""
                                             : fmt::format("{} give each rank the same work with packed documents; ",
                                                           fmt::join(names, " and ")),
                                fmt::join(parts, ", "))};
}

}  // namespace phalanx::plan
