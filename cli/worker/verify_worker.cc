#include "cli/worker/verify_worker.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/verify_arguments.h"
#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/log.h"
#include "phalanx/config/run_identity.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/train/conversation_files.h"
#include "phalanx/train/ranks/rank_agreement.h"
#include "phalanx/verify/layout_report.h"

namespace phalanx::cli {
namespace {

struct Verdict {
  std::int64_t wrong = 0;
  std::string first;
};

std::optional<verify::LayoutTolerance> tolerance_of(const VerifyArguments& arguments) {
  if (!arguments.tolerance) return std::nullopt;
  const double gradient = *arguments.tolerance;
  return verify::LayoutTolerance{
      .loss = 2 * gradient, .gradient = gradient, .weight_in_use = 2 * gradient, .activation = 20 * gradient};
}

/// Prints the allowed differences of the layouts, one line per kind.
void print_expected(const std::vector<config::NamedLayout>& layouts, const VerifyArguments& arguments,
                    at::Device device) {
  std::vector<std::string> lines;
  for (const auto& [name, config, ranks] : layouts) {
    const auto tolerance = tolerance_of(arguments).value_or(verify::tolerance_for(config, ranks, device));
    const std::string line = verify::tolerance_text(config, ranks, tolerance);
    if (std::ranges::find(lines, line) == lines.end()) lines.push_back(line);
  }
  for (const std::string& line : lines) fmt::print("{}\n", line);
  std::fflush(stdout);
}

/// What --all did not check, one line per reason.
void print_left_out(const std::vector<config::LeftOutLayout>& left_out) {
  if (left_out.empty()) return;
  std::vector<std::pair<std::string, std::vector<std::string>>> by_reason;
  for (const auto& [name, reason] : left_out) {
    auto known = std::ranges::find(by_reason, reason, &std::pair<std::string, std::vector<std::string>>::first);
    if (known == by_reason.end()) known = by_reason.insert(known, {reason, {}});
    known->second.push_back(name);
  }
  fmt::print("left out, because this model or batch does not allow them, or no single rank repeats them: {} layout{}\n",
             left_out.size(), left_out.size() == 1 ? "" : "s");
  for (const auto& [reason, names] : by_reason) {
    fmt::print("  {}: {}\n", fmt::join(names, "; "), reason);
  }
}

/// Collective over the world. Ranks that the layout does not need do nothing. Prints on rank 0.
void verify(const config::NamedLayout& layout, const VerifyArguments& arguments, bool in_detail,
            const ProcessContext& process, Verdict& verdict, nlohmann::json& record) {
  const auto begin = std::chrono::steady_clock::now();
  const int rank = process.world->rank();
  const auto group = process.world->split(rank < layout.ranks ? 0 : -1, rank);
  std::string finding;
  if (group) {
    const verify::LayoutCheck check =
        verify::check_layout(train::config_of_data(layout.config, group), {.world = group, .device = process.device},
                             {.steps = arguments.steps, .tolerance = tolerance_of(arguments)});
    if (check.finding) finding = check.finding->text();
    if (rank == 0) {
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      if (in_detail) fmt::print("{}", verify::layout_table(check));
      fmt::print("{}\n", verify::layout_line(layout.name, check, seconds));
      std::fflush(stdout);
      record.push_back(verify::layout_record(layout.name, check));
    }
  }
  finding = process.world->broadcast_bytes(finding);
  if (finding.empty()) return;
  if (verdict.wrong++ == 0) verdict.first = fmt::format("layout {}, {}", layout.name, finding);
}

}  // namespace

int verify_worker(const Arguments& arguments) {
  const VerifyArguments parsed = parse_verify_arguments(arguments);
  std::vector<std::string> notes;
  const config::TrainConfig config = config::read_config(parsed.config, parsed.overrides, &notes);
  const ProcessContext process =
      init_from_environment({.backend = config.comm.backend, .loads_kernels_at_start = true});
  for (const std::string& note : notes) log::warn_once(note);
  Verdict verdict;
  try {
    train::require_same_on_ranks(*process.world, "configuration", config::settings_of_all_ranks(config),
                                 "start every rank with the same configuration");
    std::vector<config::LeftOutLayout> left_out;
    const auto layouts = layouts_to_verify(parsed, process.world->size(), &left_out);
    const bool in_detail = parsed.table || layouts.size() == 1;
    nlohmann::json record = nlohmann::json::array();
    if (process.world->rank() == 0) print_expected(layouts, parsed, process.device);
    for (const auto& layout : layouts) verify(layout, parsed, in_detail, process, verdict, record);
    if (process.world->rank() == 0) {
      print_left_out(left_out);
      fmt::print("{} of {} layout{} right over {} step{}\n", std::ssize(layouts) - verdict.wrong, layouts.size(),
                 layouts.size() == 1 ? "" : "s", parsed.steps, parsed.steps == 1 ? "" : "s");
      std::fflush(stdout);
      for (const auto& [name, reason] : left_out) record.push_back({{"layout", name}, {"left_out", reason}});
      if (!parsed.json.empty()) {
        std::ofstream file(parsed.json);
        file << record.dump(1) << "\n";
        if (!file.flush()) throw Error(fmt::format("--json: cannot write '{}'", parsed.json));
      }
    }
  } catch (const std::exception& error) {
    process.world->abort(error.what());
    throw;
  }
  if (verdict.wrong > 0) throw Error(verdict.first);
  return 0;
}

}  // namespace phalanx::cli
