#include "phalanx/schedule/schedule_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <map>
#include <system_error>
#include <vector>

#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/nearest.h"
#include "phalanx/schedule/actions.h"

namespace phalanx::schedule {
namespace {

struct ActionKindText {
  ActionKind kind;
  std::string_view text;
  bool has_micro_batch;
};

constexpr std::array<ActionKindText, 12> kActionKinds = {{
    {ActionKind::forward, "F", true},
    {ActionKind::backward, "B", true},
    {ActionKind::backward_input, "I", true},
    {ActionKind::backward_weight, "W", true},
    {ActionKind::send_forward, "SEND_F", true},
    {ActionKind::recv_forward, "RECV_F", true},
    {ActionKind::send_backward, "SEND_B", true},
    {ActionKind::recv_backward, "RECV_B", true},
    {ActionKind::unshard, "UNSHARD", false},
    {ActionKind::reshard, "RESHARD", false},
    {ActionKind::reduce_gradients, "REDUCE_GRAD", false},
    {ActionKind::overlap, "OVERLAP_F_B", false},
}};

constexpr std::string_view kExpected =
    "expected [stage][kind][micro-batch] such as 2F0, 1B3, 0I2, 0W2, 1SEND_F3, 2RECV_F3, 0UNSHARD, or "
    "(0F1;3B0)OVERLAP_F_B";

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r";
  const std::size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

[[noreturn]] void malformed(std::string_view text, std::string_view why) {
  throw ConfigError(fmt::format("'{}' is no action: {}; {}", text, why, kExpected));
}

// A million stages or micro-batches are a typing error, and would be allocated.
constexpr int kLargestNumber = 999'999;

int number(std::string_view digits, std::string_view what, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc{} || end != digits.data() + digits.size() || value > kLargestNumber) {
    malformed(text, fmt::format("its {} '{}' is not a number from 0 to {}", what, digits, kLargestNumber));
  }
  return value;
}

Action parse_overlap(std::string_view text) {
  const std::size_t close = text.find(')');
  if (close == std::string_view::npos) malformed(text, "its '(' is not closed");
  if (text.substr(close + 1) != "OVERLAP_F_B") {
    malformed(text, fmt::format("OVERLAP_F_B should follow ')', found '{}'", text.substr(close + 1)));
  }
  // As in torch, the overlap itself has no stage and no micro-batch.
  Action action{.stage = -1, .kind = ActionKind::overlap, .micro_batch = -1, .sub_actions = {}};
  std::string_view sub_actions = text.substr(1, close - 1);
  while (true) {
    const std::size_t end = std::min(sub_actions.find(';'), sub_actions.size());
    const std::string_view part = trimmed(sub_actions.substr(0, end));
    if (part.starts_with('(')) malformed(text, "an OVERLAP_F_B cannot be part of another");
    if (part.empty()) malformed(text, "one of its parts is empty");
    action.sub_actions.push_back(parse_action(part));
    if (end == sub_actions.size()) return action;
    sub_actions.remove_prefix(end + 1);
  }
}

// Infers the ranks of the stages and the number of micro-batches from the actions.
void infer_stages(Schedule& schedule, std::string_view where) {
  int stages = 0;
  for (const auto& row : schedule.actions) {
    for (const Action& action : row) {
      for_each_sub_action(action, [&](const Action& part) {
        stages = std::max(stages, part.stage + 1);
        schedule.micro_batches = std::max(schedule.micro_batches, part.micro_batch + 1);
      });
    }
  }
  std::map<int, std::map<int, int>> passes;  // by stage: how many on each rank that has any
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions[static_cast<std::size_t>(rank)]) {
      for_each_sub_action(action, [&](const Action& part) {
        if (is_pass(part.kind)) ++passes[part.stage][rank];
      });
    }
  }
  for (int stage = 0; stage < stages; ++stage) {
    const auto found = passes.find(stage);
    if (found == passes.end()) {
      throw ConfigError(
          fmt::format("{}stage {} has no F, B, I or W on any rank: expected passes of every stage from 0 to {}", where,
                      stage, stages - 1));
    }
    const auto fewer = [](const auto& a, const auto& b) { return a.second < b.second; };
    schedule.rank_of_stage.push_back(std::max_element(found->second.begin(), found->second.end(), fewer)->first);
  }
}

}  // namespace

std::string_view to_text(ActionKind kind) {
  return std::find_if(kActionKinds.begin(), kActionKinds.end(), [&](const ActionKindText& k) { return k.kind == kind; })
      ->text;
}

std::string to_text(const Action& action) {
  if (action.kind == ActionKind::overlap) {
    std::string text = "(";
    for (const Action& part : action.sub_actions) text += (text.size() > 1 ? ";" : "") + to_text(part);
    return text + ")OVERLAP_F_B";
  }
  std::string text = fmt::format("{}{}", action.stage, to_text(action.kind));
  if (action.micro_batch >= 0) text += std::to_string(action.micro_batch);
  return text;
}

Action parse_action(std::string_view text) {
  text = trimmed(text);
  if (text.starts_with('(')) return parse_overlap(text);
  constexpr std::string_view kDigits = "0123456789";
  const std::size_t kind_at = std::min(text.find_first_not_of(kDigits), text.size());
  if (kind_at == 0) malformed(text, "it does not begin with the number of a stage");
  const std::size_t kind_end = std::min(text.find_first_of(kDigits, kind_at), text.size());
  const std::string_view kind_text = text.substr(kind_at, kind_end - kind_at);
  const auto* const known = std::find_if(kActionKinds.begin(), kActionKinds.end(),
                                         [&](const ActionKindText& k) { return k.text == kind_text; });
  if (known == kActionKinds.end()) {
    std::vector<std::string> names;
    names.reserve(kActionKinds.size());
    for (const ActionKindText& k : kActionKinds) names.emplace_back(k.text);
    malformed(text, kind_text.empty() ? "the kind is missing"
                                      : fmt::format("unknown kind '{}'{}", kind_text, did_you_mean(kind_text, names)));
  }
  if (known->kind == ActionKind::overlap) malformed(text, "OVERLAP_F_B stands behind its parts in brackets");
  Action action{.stage = number(text.substr(0, kind_at), "stage", text),
                .kind = known->kind,
                .micro_batch = -1,
                .sub_actions = {}};
  const std::string_view rest = text.substr(kind_end);
  if (known->has_micro_batch && rest.empty()) malformed(text, fmt::format("{} needs a micro-batch", known->text));
  if (!known->has_micro_batch && !rest.empty()) {
    malformed(text, fmt::format("{} takes no micro-batch, found '{}'", known->text, rest));
  }
  if (known->has_micro_batch) action.micro_batch = number(rest, "micro-batch", text);
  return action;
}

std::string to_csv(const Schedule& schedule) {
  std::string text;
  for (const auto& row : schedule.actions) {
    for (std::size_t i = 0; i < row.size(); ++i) text += (i > 0 ? "," : "") + to_text(row[i]);
    text += '\n';
  }
  return text;
}

Schedule parse_csv(std::string_view text, const CsvOptions& options) {
  const std::string where = options.file.empty() ? "" : options.file + ": ";
  Schedule schedule;
  schedule.name = options.name;
  text = text_after_mark<ConfigError>(text, options.file.empty() ? "schedule" : options.file);
  std::vector<std::string_view> rows;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    rows.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  while (!rows.empty() && trimmed(rows.back()).empty()) rows.pop_back();
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    const std::size_t line = rank + 1;
    std::string_view row = rows[rank];
    std::vector<Action>& actions = schedule.actions.emplace_back();
    for (int cell = 1;; ++cell) {
      const std::size_t end = std::min(row.find(','), row.size());
      std::string_view content = trimmed(row.substr(0, end));
      if (content.size() >= 2 && content.front() == '"' && content.back() == '"') {
        content = trimmed(content.substr(1, content.size() - 2));
      }
      try {
        if (!content.empty()) actions.push_back(parse_action(content));
      } catch (const ConfigError& error) {
        throw ConfigError(fmt::format("{}line {}, cell {}: {}", where, line, cell, error.what()));
      }
      if (end == row.size()) break;
      row.remove_prefix(end + 1);
    }
    if (actions.empty()) {
      throw ConfigError(fmt::format("{}line {}: expected rank {}'s actions, found none", where, line, rank));
    }
  }
  if (schedule.actions.empty()) {
    throw ConfigError(fmt::format("{}expected one line of actions a rank, found no line", where));
  }
  infer_stages(schedule, where);
  return schedule;
}

Schedule read_csv(const std::filesystem::path& path) {
  constexpr std::uint64_t kMostBytes = 1ULL << 30;
  return parse_csv(read_file(path, kMostBytes), {.name = path.stem().string(), .file = path.string()});
}

std::string to_table(const Schedule& schedule) {
  std::size_t steps = 0;
  for (const auto& row : schedule.actions) steps = std::max(steps, row.size());
  std::vector<std::vector<std::string>> columns;
  for (const auto& row : schedule.actions) {
    std::vector<std::string>& column = columns.emplace_back();
    for (const Action& action : row) column.push_back(to_text(action));
    column.resize(steps);
  }
  return to_table(columns);
}

std::string to_table(const std::vector<std::vector<std::string>>& columns) {
  std::size_t steps = 0;
  for (const auto& column : columns) steps = std::max(steps, column.size());
  const std::size_t digits = std::to_string(std::max<std::size_t>(steps, 1) - 1).size();
  std::string table(digits + 7, ' ');  // "Step NN: "
  std::vector<std::size_t> widths;
  for (std::size_t rank = 0; rank < columns.size(); ++rank) {
    const std::string label = fmt::format("Rank {}", rank);
    std::size_t width = label.size();
    for (const std::string& cell : columns[rank]) width = std::max(width, cell.size());
    widths.push_back(width);
    table += fmt::format("{:<{}} ", label, width);
  }
  const auto end_line = [&] {
    table.erase(table.find_last_not_of(' ') + 1);
    table += '\n';
  };
  end_line();
  for (std::size_t step = 0; step < steps; ++step) {
    table += fmt::format("Step {:0{}}: ", step, digits);
    for (std::size_t rank = 0; rank < columns.size(); ++rank) {
      table += fmt::format("{:<{}} ", step < columns[rank].size() ? columns[rank][step] : "", widths[rank]);
    }
    end_line();
  }
  return table;
}

}  // namespace phalanx::schedule
