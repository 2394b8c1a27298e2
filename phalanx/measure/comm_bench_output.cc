#include "phalanx/measure/comm_bench_output.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace phalanx::measure {
namespace {

constexpr auto kColumns =
    "{:<14} {:>6} {:<8} {:<7} {:<9} {:<5} {:>9} {:>9} {:>9} {:>9} {:>4} {:>8} {:>8} {:>6} {:>8} {:>6}";

std::string op_text(const CommBenchRow& row) {
  return reduces(row.what.verb) ? std::string(text_of(row.what.op)) : std::string("-");
}

/// About four significant digits at any size.
std::string micro(double seconds) {
  const double us = seconds * 1e6;
  return us < 1000 ? fmt::format("{:.2f}", us) : fmt::format("{:.0f}", us);
}

std::string speed(double gbs) { return gbs < 100 ? fmt::format("{:.3f}", gbs) : fmt::format("{:.1f}", gbs); }

// One list for CSV and JSON, so that they cannot differ.
nlohmann::ordered_json fields_of(const CommBenchRow& row, const std::vector<std::string>& baselines) {
  const auto us = [](double seconds) { return static_cast<double>(static_cast<std::int64_t>(seconds * 1e9)) / 1e3; };
  nlohmann::ordered_json out = {{"op", name_of(row.what.verb)},
                                {"bytes", row.what.bytes()},
                                {"count", row.what.count},
                                {"dtype", text_of(row.what.type)},
                                {"reduce_op", op_text(row)},
                                {"place", name_of(row.what.place)},
                                {"root", is_rooted(row.what.verb) ? nlohmann::ordered_json(row.what.root) : nullptr},
                                {"ranks", row.ranks},
                                {"backend", row.backend},
                                {"p50_us", us(row.p50)},
                                {"p99_us", us(row.p99)},
                                {"min_us", us(row.least)},
                                {"cpu_us", us(row.cpu)},
                                {"slowest_rank", row.slowest_rank},
                                {"calls", row.calls},
                                {"rounds", row.rounds},
                                {"algbw_gbs", row.algbw()},
                                {"busbw_gbs", row.busbw()}};
  out["wrong"] = row.wrong ? nlohmann::ordered_json(*row.wrong) : nullptr;
  out["copy_us"] = row.copy_seconds ? nlohmann::ordered_json(us(*row.copy_seconds)) : nullptr;
  out["copy_share"] = row.copy_share() ? nlohmann::ordered_json(*row.copy_share()) : nullptr;
  for (const std::string& baseline : baselines) {
    const auto found = row.baselines.find(baseline);
    out["times_" + baseline] = nullptr;
    if (found != row.baselines.end()) out["times_" + baseline] = found->second / row.p50;
  }
  return out;
}

}  // namespace

double CommBenchRow::algbw() const { return p50 > 0 ? static_cast<double>(what.bytes()) / p50 / 1e9 : 0; }

double CommBenchRow::busbw() const { return algbw() * bus_factor(what.verb, ranks); }

std::optional<double> CommBenchRow::copy_share() const {
  if (!copy_seconds || p50 <= 0) return std::nullopt;
  return *copy_seconds / p50;
}

double percentile(std::span<const double> sorted, int percent) {
  if (sorted.empty()) return 0;
  const std::size_t rank = (sorted.size() * static_cast<std::size_t>(percent) + 99) / 100;  // from 1, rounded up
  return sorted[std::max<std::size_t>(rank, 1) - 1];
}

std::string table_header(const CommBenchResult& result) {
  std::string text = fmt::format(
      "# {} rank{} on {}: {}, {} usable core{}; times are the slowest rank's, GB = 1e9 bytes\n", result.ranks,
      result.ranks == 1 ? "" : "s", result.host, result.cpu, result.cores, result.cores == 1 ? "" : "s");
  text += fmt::format(kColumns, "op", "bytes", "type", "reduce", "backend", "place", "p50 us", "p99 us", "min us",
                      "cpu us", "slow", "algbw", "busbw", "wrong", "copy", "% copy");
  for (const std::string& baseline : result.baselines) text += fmt::format(" {:>10}", "vs " + baseline);
  return text + "\n";
}

std::string table_line(const CommBenchRow& row, const std::vector<std::string>& baselines) {
  const bool moves = row.what.bytes() > 0;
  const std::string none = "-";
  const auto copy_speed =
      row.copy_seconds ? speed(static_cast<double>(row.what.bytes()) / *row.copy_seconds / 1e9) : none;
  std::string text =
      fmt::format(kColumns, name_of(row.what.verb), size_text(row.what.bytes()), moves ? text_of(row.what.type) : none,
                  op_text(row), row.backend, name_of(row.what.place), micro(row.p50), micro(row.p99), micro(row.least),
                  micro(row.cpu), row.slowest_rank, moves ? speed(row.algbw()) : none,
                  moves ? speed(row.busbw()) : none, row.wrong ? fmt::format("{}", *row.wrong) : none, copy_speed,
                  row.copy_share() ? fmt::format("{:.0f}", *row.copy_share() * 100) : none);
  for (const std::string& baseline : baselines) {
    const auto found = row.baselines.find(baseline);
    const bool compares = found != row.baselines.end() && baseline != row.backend;
    text += fmt::format(" {:>10}", compares ? fmt::format("{:.1f}x", found->second / row.p50) : none);
  }
  return text + "\n";
}

std::string to_csv(const CommBenchResult& result) {
  std::string text;
  for (const CommBenchRow& row : result.rows) {
    const auto fields = fields_of(row, result.baselines);
    if (text.empty()) {
      for (const auto& [name, value] : fields.items()) text += (text.empty() ? "" : ",") + name;
      text += "\n";
    }
    std::string line;
    for (const auto& [name, value] : fields.items()) {
      if (!line.empty()) line += ',';
      if (!value.is_null()) line += value.is_string() ? value.get<std::string>() : value.dump();
    }
    text += line + "\n";
  }
  return text;
}

std::string to_json(const CommBenchResult& result) {
  nlohmann::ordered_json out = {{"ranks", result.ranks},   {"host", result.host},
                                {"cpu", result.cpu},       {"cores", result.cores},
                                {"device", result.device}, {"stopped", result.stopped},
                                {"notes", result.notes},   {"rows", nlohmann::ordered_json::array()}};
  for (const CommBenchRow& row : result.rows) out["rows"].push_back(fields_of(row, result.baselines));
  return out.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace phalanx::measure
