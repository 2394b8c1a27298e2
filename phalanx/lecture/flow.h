// Flow: what each rank holds at each moment of a run, written by the ranks themselves. A table with a column for each
// rank in text, and a picture of the same.
//
//   Flow flow(4);
//   stage.on_ranks(4, [&](Rank& rank) {
//     at::Tensor x = at::full({1}, rank.number(), rank.floats());
//     flow.add(rank, "before", tensor_text(x));
//     rank.comm().all_reduce(x);
//     flow.add(rank, "all_reduce", tensor_text(x));
//   });
//   flow.show(stage, "a sum");              // before  [0]  [1]  [2]  [3]
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/lecture/picture.h"
#include "phalanx/lecture/stage.h"

namespace phalanx::lecture {

/// "0-7", or "0" of one.
std::string range_text(std::int64_t first, std::int64_t count);

/// "[0-7,all]": which rows and columns of a whole [rows, columns] a rank has, whose parts lie in the order of the
/// ranks.
std::string part_text(const Rank& rank, const at::Tensor& part, std::int64_t rows, std::int64_t columns);

class Flow {
 public:
  explicit Flow(int ranks) : of_rank_(static_cast<std::size_t>(ranks)) {}

  /// REQUIRES: all ranks add the same moments in the same order. Each rank writes its own column, without a lock. Ranks
  /// hold the same if their cells are the same, and the elements of `held`, if it is defined.
  void add(const Rank& rank, const std::string& moment, std::string cell, const at::Tensor& held = {});
  /// Prints the table.
  void print(Stage& stage, bool compares = false) const { print_rows(stage, rows(compares)); }
  /// Prints the table and ends the block with its picture. With several ranks each line says in the end whether all
  /// hold the same, if it `compares`.
  void show(Stage& stage, const std::string& title, bool compares = false) const;

 private:
  std::vector<GridRow> rows(bool compares) const;
  std::vector<std::string> heads() const;
  void print_rows(Stage& stage, const std::vector<GridRow>& rows) const;

  struct Held {
    std::string moment, cell;
    at::Tensor tensor;  // on the host
  };
  std::vector<std::vector<Held>> of_rank_;
};

}  // namespace phalanx::lecture
