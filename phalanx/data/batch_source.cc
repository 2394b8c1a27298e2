#include "phalanx/data/batch_source.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"

namespace phalanx::data {

void check_batch(std::int64_t global_batch_size, std::int64_t ranks, std::int64_t micro_batches) {
  if (global_batch_size < 1 || ranks < 1 || micro_batches < 1) {
    throw ConfigError(fmt::format("global_batch_size {}, data-parallel ranks {} and micro-batches {} must be 1 or more",
                                  global_batch_size, ranks, micro_batches));
  }
  const std::int64_t parts = ranks * micro_batches;
  if (global_batch_size % parts == 0) return;
  const std::int64_t below = global_batch_size / parts * parts;
  const std::string sizes = below > 0 ? fmt::format("{} or {}", below, below + parts) : fmt::format("{}", parts);
  std::int64_t fewer = ranks;
  while (fewer > 1 && global_batch_size % (fewer * micro_batches) != 0) --fewer;
  std::int64_t more = ranks;
  while (more * micro_batches <= global_batch_size && global_batch_size % (more * micro_batches) != 0) ++more;
  std::string counts;
  if (global_batch_size % (fewer * micro_batches) == 0) counts = fmt::format("{}", fewer);
  if (more * micro_batches <= global_batch_size) counts += fmt::format("{}{}", counts.empty() ? "" : " or ", more);
  throw ConfigError(fmt::format(
      "global_batch_size {} cannot be divided over {} data-parallel ranks{}: the nearest batch "
      "sizes that can are {}{}",
      global_batch_size, ranks, micro_batches > 1 ? fmt::format(" of {} micro-batches each", micro_batches) : "", sizes,
      counts.empty() ? "" : fmt::format(", the nearest numbers of ranks {}", counts)));
}

RowRange BatchSource::rows_of(const BatchShare& share) const {
  check_batch(global_batch_size(), share.ranks, share.micro_batches);
  if (share.rank < 0 || share.rank >= share.ranks || share.micro_batch < 0 ||
      share.micro_batch >= share.micro_batches) {
    throw ConfigError(fmt::format("rank {} of {} and micro-batch {} of {} do not exist", share.rank, share.ranks,
                                  share.micro_batch, share.micro_batches));
  }
  const std::int64_t rows = global_batch_size() / share.ranks / share.micro_batches;
  const std::int64_t begin = (share.rank * share.micro_batches + share.micro_batch) * rows;
  return {begin, begin + rows};
}

void BatchSource::check_request(std::int64_t step, RowRange rows, std::size_t inputs, std::size_t labels) const {
  if (step < 0 || rows.begin < 0 || rows.end < rows.begin || rows.end > global_batch_size()) {
    throw ConfigError(
        fmt::format("step {}, rows [{}, {}): expected a step of 0 or more and rows within the batch of {}", step,
                    rows.begin, rows.end, global_batch_size()));
  }
  if (static_cast<std::int64_t>(inputs) == rows.size() * seq_len() && inputs == labels) return;
  throw ConfigError(fmt::format("batch buffers hold {} and {} ids: expected {} ({} rows of {})", inputs, labels,
                                rows.size() * seq_len(), rows.size(), seq_len()));
}

}  // namespace phalanx::data
