#include "phalanx/lecture/flow.h"

#include <ATen/ops/equal.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace phalanx::lecture {

std::string range_text(std::int64_t first, std::int64_t count) {
  return count == 1 ? std::to_string(first) : fmt::format("{}-{}", first, first + count - 1);
}

std::string part_text(const Rank& rank, const at::Tensor& part, std::int64_t rows, std::int64_t columns) {
  const auto range = [&](std::int64_t size, std::int64_t whole) {
    return size == whole ? std::string("all") : range_text(rank.number() * size, size);
  };
  return fmt::format("[{},{}]", range(part.size(0), rows), range(part.size(1), columns));
}

void Flow::add(const Rank& rank, const std::string& moment, std::string cell, const at::Tensor& held) {
  of_rank_[static_cast<std::size_t>(rank.number())].push_back(
      {moment, std::move(cell), held.defined() ? held.detach().cpu().clone() : held});
}

std::vector<std::string> Flow::heads() const {
  std::vector<std::string> heads;
  for (std::size_t rank = 0; rank < of_rank_.size(); ++rank) heads.push_back(fmt::format("rank {}", rank));
  return heads;
}

std::vector<GridRow> Flow::rows(bool compares) const {
  const bool several = of_rank_.size() > 1;
  std::vector<GridRow> rows;
  for (std::size_t moment = 0; moment < of_rank_.front().size(); ++moment) {
    const Held& first = of_rank_.front()[moment];
    GridRow row{first.moment, {}};
    row.is_equal = several;
    for (const auto& of_rank : of_rank_) {
      const Held& held = of_rank.at(moment);
      row.cells.push_back(held.cell);
      row.is_equal =
          row.is_equal && held.cell == first.cell && (!held.tensor.defined() || at::equal(held.tensor, first.tensor));
    }
    if (compares && several) row.remark = row.is_equal ? "equal" : "different";
    rows.push_back(std::move(row));
  }
  return rows;
}

void Flow::print_rows(Stage& stage, const std::vector<GridRow>& rows) const {
  constexpr std::size_t kGap = 2;
  const std::vector<std::string> heads = this->heads();
  std::size_t left = 0;
  std::vector<std::size_t> widths;
  for (const std::string& head : heads) widths.push_back(head.size() + kGap);
  for (const GridRow& row : rows) {
    left = std::max(left, row.label.size() + kGap);
    for (std::size_t rank = 0; rank < heads.size(); ++rank) {
      widths[rank] = std::max(widths[rank], row.cells[rank].size() + kGap);
    }
  }
  const auto print = [&](const std::string& label, const std::vector<std::string>& cells, const std::string& remark) {
    std::string line = fmt::format("{:<{}}", label, left);
    for (std::size_t rank = 0; rank < heads.size(); ++rank) line += fmt::format("{:<{}}", cells[rank], widths[rank]);
    line += remark;
    stage.print(line.substr(0, line.find_last_not_of(' ') + 1));
  };
  print("", heads, "");
  for (const GridRow& row : rows) print(row.label, row.cells, row.remark);
}

void Flow::show(Stage& stage, const std::string& title, bool compares) const {
  const std::vector<GridRow> rows = this->rows(compares);
  print_rows(stage, rows);
  stage.show({picture_of_grid(title, heads(), rows)});
}

}  // namespace phalanx::lecture
