#include "phalanx/data/data_loader.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/data/permutation.h"
#include "phalanx/data/stream_description.h"

namespace phalanx::data {
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
  if (options_.separate_documents && !tokens_.lists_documents()) {
    throw DataError(
        fmt::format("{}: {}, which does not list its documents; expected a Megatron file (.bin with .idx) "
                    "with document bounds, as `phalanx tokenize` writes it, to keep documents apart",
                    tokens_.path(),
                    tokens_.format() == TokenFormat::megatron ? "an index without document bounds"
                                                              : fmt::format("a {} file", to_string(tokens_.format()))));
  }
  if (options_.pack) {
    if (!options_.separate_documents) throw ConfigError("packed rows hold several documents: keep them separate");
    packed_ = std::make_shared<const PackedRows>(tokens_, PackedRowsOptions{.seq_len = options_.seq_len,
                                                                            .range = range_,
                                                                            .shuffle = options_.shuffle,
                                                                            .seed = options_.seed,
                                                                            .pairs = options_.pairs});
    sample_count_ = packed_->row_count();
    DataLoader::begin_at(0, {});
    return;
  }
  sample_count_ = (range_.size() - 1) / options_.seq_len;
  if (range_.size() < 1 || sample_count_ < 1) {
    throw DataError(
        fmt::format("{}: {} tokens are too few for one sample: expected at least {} (seq_len {} and one label); "
                    "use more data or a shorter seq_len",
                    tokens_.path(), range_.size(), options_.seq_len + 1, options_.seq_len));
  }
  DataLoader::begin_at(0, {});
}

void DataLoader::begin_at(std::int64_t step, StreamPosition position) {
  const std::int64_t seq = options_.seq_len;
  const std::int64_t tokens = packed_ ? epoch_tokens() : range_.size();
  if (position.epoch < 0 || position.token < 0 || position.token >= tokens) {
    throw ConfigError(fmt::format("epoch {}, token {}: expected a place among the {} tokens of {}", position.epoch,
                                  position.token, tokens, tokens_.path()));
  }
  if ((options_.shuffle || packed_) && position.token % seq != 0) {
    throw ConfigError(fmt::format("epoch {}, token {}: {} samples of seq_len {} begin at its multiples", position.epoch,
                                  position.token, packed_ ? "packed" : "shuffled", seq));
  }
  first_step_ = step;
  first_ = position;
  rest_of_epoch_ = packed_ ? sample_count_ - position.token / seq : (range_.size() - 1 - position.token) / seq;
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

std::int64_t DataLoader::first_token(StreamPosition place) const {
  if (!options_.shuffle) return place.token;
  const Permutation order(sample_count_, {options_.seed, static_cast<std::uint64_t>(place.epoch)});
  return order(place.token / options_.seq_len) * options_.seq_len;
}

std::int64_t DataLoader::token_at(std::int64_t step, std::int64_t row) const {
  const StreamPosition place = place_of(step, row);
  if (packed_) return packed_->row(place.epoch, place.token / options_.seq_len).front().begin - range_.begin;
  return first_token(place);
}

std::vector<std::int64_t> DataLoader::document_starts(std::int64_t after, std::int64_t last) const {
  std::int64_t low = 0, high = tokens_.document_count();
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    tokens_.document(middle).begin <= after ? low = middle + 1 : high = middle;
  }
  std::vector<std::int64_t> starts;
  for (; low < tokens_.document_count(); ++low) {
    const std::int64_t start = tokens_.document(low).begin;
    if (start > last) break;
    if (starts.empty() || starts.back() != start) starts.push_back(start);  // once where a document is empty
  }
  return starts;
}

std::int64_t DataLoader::label_count(std::int64_t step) const {
  const std::int64_t seq = options_.seq_len;
  const bool has_mask = !tokens_.mask().empty();
  if (!options_.separate_documents && !has_mask) return options_.global_batch_size * seq;
  std::int64_t sum = 0;
  for (std::int64_t row = 0; row < options_.global_batch_size; ++row) {
    const StreamPosition place = place_of(step, row);
    if (packed_) {
      sum += packed_->label_count(place.epoch, place.token / seq);
    } else {
      const std::int64_t first = range_.begin + first_token(place);
      sum += tokens_.trained_count({first + 1, first + seq + 1});
      if (!options_.separate_documents) continue;
      for (const std::int64_t start : document_starts(first, first + seq)) {
        sum -= tokens_.trained_count({start, start + 1});
      }
    }
  }
  return sum;
}

void DataLoader::check_buffers(std::int64_t rows, std::size_t inputs, std::size_t labels) const {
  const std::int64_t seq = options_.seq_len;
  if (static_cast<std::int64_t>(inputs) == rows * seq && inputs == labels) return;
  throw ConfigError(fmt::format("batch buffers hold {} and {} ids: expected {} ({} rows of {})", inputs, labels,
                                rows * seq, rows, seq));
}

/// `labels`: tokens from first + 1 on.
void DataLoader::leave_out_untrained(std::int64_t first, std::span<std::int64_t> labels) const {
  const std::span<const std::uint8_t> mask = tokens_.mask();
  if (mask.empty()) return;
  const auto is_trained = mask.subspan(static_cast<std::size_t>(first + 1), labels.size());
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (is_trained[i] == 0) labels[i] = kIgnoredLabel;
  }
}

void DataLoader::fill_row(StreamPosition place, const Row& row) const {
  const std::int64_t seq = options_.seq_len, first = range_.begin + first_token(place);
  std::vector<std::int64_t> sample(static_cast<std::size_t>(seq + 1));
  tokens_.read(first, sample);
  std::copy(sample.begin(), sample.end() - 1, row.inputs.begin());
  std::copy(sample.begin() + 1, sample.end(), row.labels.begin());
  leave_out_untrained(first, row.labels);
  if (!options_.separate_documents) return;
  for (const std::int64_t start : document_starts(first, first + seq)) {
    row.labels[static_cast<std::size_t>(start - first - 1)] = kIgnoredLabel;
    if (start < first + seq) row.ends.push_back(static_cast<std::int32_t>(row.at + start - first));
  }
  row.ends.push_back(static_cast<std::int32_t>(row.at + seq));
}

void DataLoader::fill_packed_row(StreamPosition place, const Row& row) const {
  const std::int64_t seq = options_.seq_len;
  std::int64_t filled = 0;
  std::vector<std::int64_t> tokens;
  for (const PackedRows::Piece& piece : packed_->row(place.epoch, place.token / seq)) {
    tokens.resize(static_cast<std::size_t>(piece.count + 1));
    tokens_.read(piece.begin, tokens);
    std::copy(tokens.begin(), tokens.end() - 1, row.inputs.begin() + filled);
    const auto labels = row.labels.subspan(static_cast<std::size_t>(filled), static_cast<std::size_t>(piece.count));
    std::copy(tokens.begin() + 1, tokens.end(), labels.begin());
    leave_out_untrained(piece.begin, labels);
    filled += piece.count;
    row.ends.push_back(static_cast<std::int32_t>(row.at + filled));
  }
  std::fill(row.inputs.begin() + filled, row.inputs.end(), 0);
  std::fill(row.labels.begin() + filled, row.labels.end(), kIgnoredLabel);
  while (filled < seq) {
    filled = std::min(filled + kPaddingPiece, seq);
    row.ends.push_back(static_cast<std::int32_t>(row.at + filled));
  }
}

template <class PlaceOf>
std::vector<std::int32_t> DataLoader::fill_rows(std::int64_t rows, std::span<std::int64_t> inputs,
                                                std::span<std::int64_t> labels, const PlaceOf& place_of_row) const {
  check_buffers(rows, inputs.size(), labels.size());
  const auto seq = static_cast<std::size_t>(options_.seq_len);
  std::vector<std::int32_t> ends;
  if (options_.separate_documents) ends.push_back(0);
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::size_t at = static_cast<std::size_t>(i) * seq;
    const Row row{inputs.subspan(at, seq), labels.subspan(at, seq), ends, static_cast<std::int64_t>(at)};
    packed_ ? fill_packed_row(place_of_row(i), row) : fill_row(place_of_row(i), row);
  }
  return ends;
}

std::vector<std::int32_t> DataLoader::fill_samples(std::int64_t first, std::int64_t count,
                                                   std::span<std::int64_t> inputs,
                                                   std::span<std::int64_t> labels) const {
  if (first < 0 || count < 1 || first + count > sample_count_) {
    throw ConfigError(
        fmt::format("samples [{}, {}): expected some of the {} of an epoch", first, first + count, sample_count_));
  }
  return fill_rows(count, inputs, labels,
                   [&](std::int64_t i) { return StreamPosition{.epoch = 0, .token = (first + i) * options_.seq_len}; });
}

std::vector<std::int32_t> DataLoader::fill(std::int64_t step, RowRange rows, std::span<std::int64_t> inputs,
                                           std::span<std::int64_t> labels) const {
  check_request(step, rows, inputs.size(), labels.size());
  return fill_rows(rows.size(), inputs, labels, [&](std::int64_t i) { return place_of(step, rows.begin + i); });
}

std::vector<std::int64_t> DataLoader::pairs_of_row(StreamPosition place) const {
  const auto first_at_or_behind = [&](std::int64_t token) {
    std::int64_t low = 0, high = tokens_.document_count();
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      tokens_.document(middle).begin < token ? low = middle + 1 : high = middle;
    }
    return low;
  };
  const std::vector<PackedRows::Piece> pieces = packed_->row(place.epoch, place.token / options_.seq_len);
  std::vector<std::int64_t> pairs;
  for (std::size_t i = 0; i < pieces.size(); i += 2) pairs.push_back(first_at_or_behind(pieces[i].begin) / 2);
  return pairs;
}

std::vector<std::vector<std::int64_t>> DataLoader::pairs_of(std::int64_t step, RowRange rows) const {
  std::vector<std::vector<std::int64_t>> all;
  for (std::int64_t row = rows.begin; options_.pairs && row < rows.end; ++row) {
    all.push_back(pairs_of_row(place_of(step, row)));
  }
  return all;
}

std::vector<std::vector<std::int64_t>> DataLoader::pairs_of_samples(std::int64_t first, std::int64_t count) const {
  std::vector<std::vector<std::int64_t>> all;
  for (std::int64_t i = first; options_.pairs && i < first + count; ++i) {
    all.push_back(pairs_of_row({.epoch = 0, .token = i * options_.seq_len}));
  }
  return all;
}

nlohmann::json DataLoader::describe() const { return describe_stream(*this); }

std::map<std::string, std::int64_t> DataLoader::saved_position(std::int64_t step) const {
  return {{kTokensRead, tokens_read(*this, step)}};
}

StreamResume DataLoader::resume(const nlohmann::json& saved,
                                const std::map<std::string, std::int64_t>& saved_position) const {
  return resume_stream(saved, tokens_in(saved_position), *this);
}

}  // namespace phalanx::data
