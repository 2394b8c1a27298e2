#include "phalanx/data/data_loader.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/data/permutation.h"

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

DataLoader::DataLoader(TokenFile tokens, DataLoaderOptions options) : tokens_(std::move(tokens)), options_(options) {
  if (options_.seq_len < 1 || options_.global_batch_size < 1) {
    throw ConfigError(fmt::format("seq_len {} and global_batch_size {} must be 1 or more", options_.seq_len,
                                  options_.global_batch_size));
  }
  range_ = options_.range.value_or(TokenRange{0, tokens_.size()});
  if (range_.begin < 0 || range_.end < range_.begin || range_.end > tokens_.size()) {
    throw DataError(fmt::format("{}: token range [{}, {}) is outside the file's {} tokens", tokens_.path(),
                                range_.begin, range_.end, tokens_.size()));
  }
  sample_count_ = (range_.size() - 1) / options_.seq_len;
  if (range_.size() < 1 || sample_count_ < 1) {
    throw DataError(
        fmt::format("{}: {} tokens are too few for one sample: expected at least {} (seq_len {} and one label); "
                    "use more data or a shorter seq_len",
                    tokens_.path(), range_.size(), options_.seq_len + 1, options_.seq_len));
  }
  begin_at(0, {});
}

RowRange DataLoader::rows_of(const BatchShare& share) const {
  check_batch(options_.global_batch_size, share.ranks, share.micro_batches);
  if (share.rank < 0 || share.rank >= share.ranks || share.micro_batch < 0 ||
      share.micro_batch >= share.micro_batches) {
    throw ConfigError(fmt::format("rank {} of {} and micro-batch {} of {} do not exist", share.rank, share.ranks,
                                  share.micro_batch, share.micro_batches));
  }
  const std::int64_t rows = options_.global_batch_size / share.ranks / share.micro_batches;
  const std::int64_t begin = (share.rank * share.micro_batches + share.micro_batch) * rows;
  return {begin, begin + rows};
}

void DataLoader::begin_at(std::int64_t step, StreamPosition position) {
  const std::int64_t seq = options_.seq_len;
  if (position.epoch < 0 || position.token < 0 || position.token >= range_.size()) {
    throw ConfigError(fmt::format("epoch {}, token {}: expected a place among the {} tokens of {}", position.epoch,
                                  position.token, range_.size(), tokens_.path()));
  }
  if (options_.shuffle && position.token % seq != 0) {
    throw ConfigError(fmt::format("epoch {}, token {}: shuffled samples of seq_len {} begin at its multiples",
                                  position.epoch, position.token, seq));
  }
  first_step_ = step;
  first_ = position;
  rest_of_epoch_ = (range_.size() - 1 - position.token) / seq;
}

StreamPosition DataLoader::place_of(std::int64_t step, std::int64_t row) const {
  const std::int64_t seq = options_.seq_len;
  const std::int64_t number = (step - first_step_) * options_.global_batch_size + row;
  if (number < rest_of_epoch_) {
    if (number >= 0) return {first_.epoch, first_.token + number * seq};
    throw ConfigError(fmt::format("step {}: expected one from {} on, where the data begin", step, first_step_));
  }
  const std::int64_t after = number - rest_of_epoch_;
  return {first_.epoch + 1 + after / sample_count_, after % sample_count_ * seq};
}

std::int64_t DataLoader::token_at(std::int64_t step, std::int64_t row) const {
  const StreamPosition place = place_of(step, row);
  if (!options_.shuffle) return place.token;
  const Permutation order(sample_count_, {options_.seed, static_cast<std::uint64_t>(place.epoch)});
  return order(place.token / options_.seq_len) * options_.seq_len;
}

void DataLoader::read_tokens(std::int64_t first, std::span<std::int64_t> out) const {
  tokens_.read(range_.begin + first, out);
}

void DataLoader::read_sample(std::int64_t sample, std::span<std::int64_t> out) const {
  if (sample < 0 || sample >= sample_count_ || static_cast<std::int64_t>(out.size()) != options_.seq_len + 1) {
    throw ConfigError(fmt::format("sample {} into {} places: expected a sample below {} and {} places", sample,
                                  out.size(), sample_count_, options_.seq_len + 1));
  }
  read_tokens(sample * options_.seq_len, out);
}

void DataLoader::fill(std::int64_t step, RowRange rows, std::span<std::int64_t> inputs,
                      std::span<std::int64_t> labels) const {
  const std::int64_t seq = options_.seq_len;
  if (step < 0 || rows.begin < 0 || rows.end < rows.begin || rows.end > options_.global_batch_size) {
    throw ConfigError(
        fmt::format("step {}, rows [{}, {}): expected a step of 0 or more and rows within the batch of {}", step,
                    rows.begin, rows.end, options_.global_batch_size));
  }
  if (static_cast<std::int64_t>(inputs.size()) != rows.size() * seq || inputs.size() != labels.size()) {
    throw ConfigError(fmt::format("batch buffers hold {} and {} ids: expected {} ({} rows of {})", inputs.size(),
                                  labels.size(), rows.size() * seq, rows.size(), seq));
  }
  std::vector<std::int64_t> sample(static_cast<std::size_t>(seq + 1));
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    read_tokens(token_at(step, row), sample);
    const std::int64_t at = (row - rows.begin) * seq;
    std::copy(sample.begin(), sample.end() - 1, inputs.begin() + at);
    std::copy(sample.begin() + 1, sample.end(), labels.begin() + at);
  }
}

}  // namespace phalanx::data
