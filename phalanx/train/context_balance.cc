#include "phalanx/train/context_balance.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "phalanx/data/data_loader.h"
#include "phalanx/layout/packed_cut.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::train {
namespace {

constexpr std::int64_t kSequences = 64;  // of all files

/// The sums, over forward passes, of the most work that a rank has and of the mean.
struct Balance {
  double worst = 0, mean = 0;
  double ratio() const { return mean > 0 ? worst / mean : 1; }
};

void add_pass(Balance& balance, const ContextCut& cut, const std::vector<DocumentBoundaries>& rows) {
  std::vector<double> work(static_cast<std::size_t>(cut.ranks));
  for (const DocumentBoundaries& row : rows) {
    const auto ranges = packed_ranges(cut, row.of_row(0));
    for (std::size_t rank = 0; rank < work.size(); ++rank) {
      work[rank] += static_cast<double>(seen_keys(ranges[rank], row.of_row(0), cut.window));
    }
  }
  double sum = 0;
  for (const double of_rank : work) sum += of_rank;
  balance.worst += std::ranges::max(work);
  balance.mean += sum / static_cast<double>(cut.ranks);
}

}  // namespace

std::string context_balance_text(const data::BatchSource& data, const config::RunPlan& plan) {
  if (plan.parallel.cp == 1 || !data.separates_documents()) return "";
  if (plan.exchange.name == "heads") return "heads are exchanged: each rank has all positions, and so the same work";
  const ContextCut cut = plan.context_cut(0);
  ContextCut head_and_tail = cut;
  head_and_tail.by_work = false;
  const std::int64_t rows_of_pass = plan.local_batch_size / plan.micro_batches;
  Balance balance, of_head_and_tail;
  std::int64_t sequences = 0, files = 0;
  data.each_file([&](const std::string&, const data::DataLoader&) { ++files; });
  const std::int64_t of_each = std::max<std::int64_t>(1, kSequences / std::max<std::int64_t>(1, files));
  data.each_file([&](const std::string&, const data::DataLoader& file) {
    const std::int64_t count = std::min(of_each, file.sample_count()), seq_len = file.seq_len();
    std::vector<std::int64_t> inputs(static_cast<std::size_t>(seq_len)), labels(inputs.size());
    std::vector<DocumentBoundaries> pass;
    for (std::int64_t i = 0; i < count; ++i) {
      pass.emplace_back(seq_len, file.fill_samples(i * file.sample_count() / count, 1, inputs, labels));
      if (std::ssize(pass) < rows_of_pass && i + 1 < count) continue;
      add_pass(balance, cut, pass);
      add_pass(of_head_and_tail, head_and_tail, pass);
      sequences += std::ssize(pass);
      pass.clear();
    }
  });
  if (sequences == 0) return "";
  const std::string over = fmt::format("over {} sequences of the data", sequences);
  if (!cut.by_work) {
    return fmt::format("heads and tails of packed sequences; attention's work, worst rank / mean: {:.3f} {}",
                       balance.ratio(), over);
  }
  return fmt::format(
      "blocks of packed sequences, by attention's work; worst rank / mean: {:.3f} {} (heads and tails: {:.3f})",
      balance.ratio(), over, of_head_and_tail.ratio());
}

}  // namespace phalanx::train
