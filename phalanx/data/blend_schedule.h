// BlendSchedule: which data set each row of a blend comes from, as a closed formula of the row's number.
//
// Weights become whole shares of a period of rows: in each period set i has exactly shares()[i] rows. Weights that are
// whole numbers with a sum of at most 10,000 are taken as they are; others are rounded to ten-thousandths of their sum
// (the largest remainders up). Rows of a set are spread evenly: among the first n rows a set has less than one row more
// or less than its share of n, for every n.
//
//   const BlendSchedule schedule({0.7, 0.2, 0.1});
//   const auto [set, number] = schedule.row(12345);  // the number-th row of that set, from 0
//
// Memory is six bytes a row of the period. All methods are const; any number of threads may call them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phalanx::data {

class BlendSchedule {
 public:
  struct Row {
    std::int64_t set = 0;
    std::int64_t number = 0;
    friend bool operator==(const Row&, const Row&) = default;
  };

  /// `names`: of the sets, for the error. Throws ConfigError for a weight that is not a positive number, or too small
  /// for one row in 10,000.
  explicit BlendSchedule(const std::vector<double>& weights, const std::vector<std::string>& names = {});

  const std::vector<std::int64_t>& shares() const { return shares_; }  // without a common divisor
  std::int64_t period() const { return static_cast<std::int64_t>(sets_.size()); }
  /// REQUIRES: row >= 0.
  Row row(std::int64_t row) const;
  /// How many of the first `rows` rows are of each set.
  std::vector<std::int64_t> counts(std::int64_t rows) const;

 private:
  std::vector<std::int64_t> shares_;
  std::vector<std::uint16_t> sets_;    // of each row of a period
  std::vector<std::int32_t> numbers_;  // of each row of a period, among its set's
};

}  // namespace phalanx::data
