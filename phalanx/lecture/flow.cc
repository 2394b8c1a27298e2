#include "phalanx/lecture/flow.h"

#include <fmt/format.h>

#include <algorithm>

namespace phalanx::lecture {

std::string part_text(const Rank& rank, const at::Tensor& part, std::int64_t rows, std::int64_t columns) {
  const auto range = [&](std::int64_t size, std::int64_t whole) {
    const std::int64_t first = rank.number() * size;
    return size == whole ? std::string("all") : fmt::format("{}-{}", first, first + size - 1);
  };
  return fmt::format("[{},{}]", range(part.size(0), rows), range(part.size(1), columns));
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
    GridRow row{of_rank_.front()[moment].first, {}};
    for (const auto& cells : of_rank_) row.cells.push_back(cells.at(moment).second);
    row.is_equal = several && std::ranges::all_of(row.cells, [&](const auto& cell) { return cell == row.cells[0]; });
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
