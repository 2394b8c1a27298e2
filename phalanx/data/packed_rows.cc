#include "phalanx/data/packed_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/data/best_fit.h"
#include "phalanx/data/permutation.h"

namespace phalanx::data {
namespace {

constexpr std::size_t kCachedWindows = 4;
/// Keys of permutations, beside the seed: an epoch's number is at least 0.
constexpr auto kOrderOfDocuments = static_cast<std::uint64_t>(-1);

std::uint64_t key_of(std::int64_t epoch, std::int64_t window) {
  return (static_cast<std::uint64_t>(window + 1) << 32U) ^ static_cast<std::uint64_t>(epoch);
}

}  // namespace

/// The rows of one window, in no epoch's order.
struct PackedRows::Window {
  std::vector<std::vector<Piece>> rows;
};

struct PackedRows::Cache {
  std::mutex mutex;
  std::list<std::pair<std::int64_t, std::shared_ptr<const Window>>> windows;  // the last used one first
  std::int64_t epoch = -1;
  std::vector<std::pair<std::int64_t, std::int64_t>> order;  // of that epoch: (first row, window)
};

PackedRows::PackedRows(TokenFile tokens, PackedRowsOptions options)
    : tokens_(std::move(tokens)), options_(options), cache_(std::make_unique<Cache>()) {
  const auto begins_before = [&](std::int64_t token) {
    std::int64_t low = 0, high = tokens_.document_count();
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      tokens_.document(middle).begin < token ? low = middle + 1 : high = middle;
    }
    return low;
  };
  first_document_ = std::max<std::int64_t>(begins_before(options_.range.begin + 1) - 1, 0);
  document_count_ = begins_before(options_.range.end) - first_document_;
  group_ = options_.pairs ? 2 : 1;
  item_count_ = document_count_ / group_;
  if (document_count_ % group_ != 0) {
    throw DataError(fmt::format("{}: {} documents: expected pairs of them", tokens_.path(), document_count_));
  }
  for (std::int64_t number = 0; number < windows(); ++number) {
    std::vector<std::int32_t>& labels = labels_.emplace_back();
    for (const auto& row : pack(number, &statistics_).rows) {
      labels.push_back(0);
      std::int32_t of_row = 0;
      for (const Piece& piece : row) of_row += static_cast<std::int32_t>(label_count(piece));
      labels.back() = options_.pairs ? static_cast<std::int32_t>(std::ssize(row) / group_) : of_row;
      statistics_.labels += of_row;
    }
    statistics_.rows += std::ssize(labels);
  }
  if (statistics_.rows > 0) return;
  throw DataError(fmt::format("{}: no document of two tokens{} among the {} of tokens [{}, {}): nothing to pack",
                              tokens_.path(), tokens_.mask().empty() ? "" : " with a trained one", document_count_,
                              options_.range.begin, options_.range.end));
}

PackedRows::~PackedRows() = default;

std::int64_t PackedRows::windows() const { return (item_count_ + options_.window - 1) / options_.window; }

void PackedRows::require_whole_pair(std::int64_t item, std::span<const Piece> pair) const {
  std::int64_t places = 0;
  bool are_trained = pair.size() == 2;
  for (const Piece& piece : pair) {
    places += piece.count;
    are_trained = are_trained && label_count(piece) > 0;
  }
  if (are_trained && places <= options_.seq_len) return;
  throw DataError(
      fmt::format("{}: the pair of documents {} and {} {}", tokens_.path(), 2 * item, 2 * item + 1,
                  are_trained ? fmt::format("takes {} places: expected at most seq_len {}", places, options_.seq_len)
                              : std::string("has one without a trained label, or one that is too long")));
}

std::int64_t PackedRows::label_count(const Piece& piece) const {
  return tokens_.trained_count({piece.begin + 1, piece.begin + piece.count + 1});
}

PackedRows::Window PackedRows::pack(std::int64_t window, Statistics* statistics) const {
  const Permutation order(item_count_, {options_.seed, kOrderOfDocuments});
  const std::int64_t first = window * options_.window, end = std::min(first + options_.window, item_count_);
  const bool is_masked = !tokens_.mask().empty();
  std::vector<Piece> pieces;
  for (std::int64_t i = first * group_; i < end * group_; ++i) {
    const std::int64_t item = options_.shuffle ? order(i / group_) : i / group_;
    const TokenRange whole = tokens_.document(first_document_ + item * group_ + i % group_);
    const TokenRange used{std::max(whole.begin, options_.range.begin), std::min(whole.end, options_.range.end)};
    const std::int64_t places = used.size() - 1;
    Statistics seen{.skipped = places < 1 ? 1 : 0, .cut = places > options_.seq_len ? 1 : 0};
    for (std::int64_t at = 0; at < places; at += options_.seq_len) {
      const Piece piece{used.begin + at, std::min(options_.seq_len, places - at)};
      if (is_masked && label_count(piece) == 0) {
        ++seen.untrained;
        continue;
      }
      pieces.push_back(piece);
      seen.documents = 1;
      seen.places += piece.count;
    }
    if (options_.pairs && i % group_ == 1) {
      const auto expected = static_cast<std::size_t>(2 * (i / group_ - first + 1));
      require_whole_pair(item, pieces.size() == expected ? std::span(pieces).last(2) : std::span<Piece>());
    }
    if (statistics == nullptr) continue;
    statistics->documents += seen.documents;
    statistics->skipped += seen.skipped;
    statistics->untrained += seen.untrained;
    statistics->cut += seen.cut;
    statistics->places += seen.places;
  }

  const auto group = static_cast<std::size_t>(group_);
  std::vector<std::int64_t> sizes;
  sizes.reserve(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); i += group) {
    sizes.push_back(0);
    for (std::size_t k = i; k < i + group; ++k) sizes.back() += pieces[k].count;
  }
  Window result;
  for (const auto& row : best_fit(sizes, options_.seq_len)) {
    auto& of_row = result.rows.emplace_back();
    for (const std::size_t item : row) {
      for (std::size_t k = item * group; k < (item + 1) * group; ++k) of_row.push_back(pieces[k]);
    }
  }
  return result;
}

std::shared_ptr<const PackedRows::Window> PackedRows::window(std::int64_t number) const {
  const std::lock_guard lock(cache_->mutex);
  auto& kept = cache_->windows;
  const auto found = std::ranges::find(kept, number, [](const auto& one) { return one.first; });
  if (found != kept.end()) {
    kept.splice(kept.begin(), kept, found);
  } else {
    kept.emplace_front(number, std::make_shared<const Window>(pack(number, nullptr)));
    if (kept.size() > kCachedWindows) kept.pop_back();
  }
  return kept.front().second;
}

PackedRows::Place PackedRows::place_of(std::int64_t epoch, std::int64_t row) const {
  const std::lock_guard lock(cache_->mutex);
  if (cache_->epoch != epoch) {
    const Permutation order(windows(), {options_.seed, key_of(epoch, -1)});
    cache_->order.clear();
    std::int64_t first = 0;
    for (std::int64_t i = 0; i < windows(); ++i) {
      const std::int64_t number = options_.shuffle ? order(i) : i;
      cache_->order.emplace_back(first, number);
      first += std::ssize(labels_[static_cast<std::size_t>(number)]);
    }
    cache_->epoch = epoch;
  }
  const auto after = std::ranges::upper_bound(cache_->order, row, {}, [](const auto& one) { return one.first; });
  const auto [first, number] = *(after - 1);
  if (!options_.shuffle) return {number, row - first};
  const Permutation order(std::ssize(labels_[static_cast<std::size_t>(number)]),
                          {options_.seed, key_of(epoch, number)});
  return {number, order(row - first)};
}

std::vector<PackedRows::Piece> PackedRows::row(std::int64_t epoch, std::int64_t row) const {
  const Place place = place_of(epoch, row);
  return window(place.window)->rows[static_cast<std::size_t>(place.row)];
}

std::int64_t PackedRows::label_count(std::int64_t epoch, std::int64_t row) const {
  const Place place = place_of(epoch, row);
  return labels_[static_cast<std::size_t>(place.window)][static_cast<std::size_t>(place.row)];
}

}  // namespace phalanx::data
