// BlendedLoader: rows of several token files, blended by weight.
//
// Row number g of the run is the n-th row of one set, both by blend_schedule.h. Each set has an order and epochs of its
// own: its n-th row is that of a DataLoader over that set alone. A set that is small for its weight is read again and
// again; one that is large is not read to its end. Nothing is kept but the number of the row, so a run resumes exactly
// at any step, with any number of ranks and any batch size.
//
// Shares are of rows. Where rows hold padding, shares of tokens may be a little off.
//
//   std::vector<BlendedLoader::Part> parts;
//   parts.push_back({.name = "web", .weight = 0.7, .rows = DataLoader(web, {.seq_len = 256, .global_batch_size = 1})});
//   parts.push_back(
//       {.name = "code", .weight = 0.3, .rows = DataLoader(code, {.seq_len = 256, .global_batch_size = 1})});
//   BlendedLoader blend(std::move(parts), /*global_batch_size=*/8);
//   blend.fill(step, rows, inputs, labels);
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/data/batch_source.h"
#include "phalanx/data/blend_schedule.h"
#include "phalanx/data/data_loader.h"

namespace phalanx::data {

/// The seed of the order of the set at this place of a blend: the run's for the first, another for each of the others,
/// so that sets of equally many samples have different orders. It is part of the stream's description.
std::uint64_t seed_of_set(std::uint64_t seed, std::size_t set);

class BlendedLoader : public BatchSource {
 public:
  struct Part {
    std::string name;
    double weight = 1;
    DataLoader rows;  // with a batch of one row: its step is the row's number
  };

  /// REQUIRES: the parts have the same seq_len and separate documents alike. Throws ConfigError for weights that cannot
  /// be met (blend_schedule.h).
  BlendedLoader(std::vector<Part> parts, std::int64_t global_batch_size);

  std::int64_t seq_len() const override { return parts_.front().rows.seq_len(); }
  std::int64_t global_batch_size() const override { return global_batch_size_; }
  bool separates_documents() const override { return parts_.front().rows.separates_documents(); }

  std::vector<std::int32_t> fill(std::int64_t step, RowRange rows, std::span<std::int64_t> inputs,
                                 std::span<std::int64_t> labels) const override;
  std::int64_t label_count(std::int64_t step) const override;

  nlohmann::json describe() const override;
  std::map<std::string, std::int64_t> saved_position(std::int64_t step) const override;
  /// Continues with the next row of each set. Other sets, weights or another order of the sets are differences; another
  /// name of a set is a note.
  StreamResume resume(const nlohmann::json& saved,
                      const std::map<std::string, std::int64_t>& saved_position) const override;
  void begin_at(std::int64_t step, StreamPosition position) override;

  std::vector<std::pair<std::string, std::string>> in_words() const override;
  std::vector<SetCount> counts_before(std::int64_t step) const override;
  void each_file(const std::function<void(const std::string&, const DataLoader&)>& use) const override;

  const BlendSchedule& schedule() const { return schedule_; }

 private:
  std::int64_t number_of(std::int64_t step, std::int64_t row) const;

  std::vector<Part> parts_;
  std::int64_t global_batch_size_;
  BlendSchedule schedule_;
  std::int64_t first_step_ = 0, first_row_ = 0;  // as begin_at() says
};

}  // namespace phalanx::data
