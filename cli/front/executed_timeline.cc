#include "cli/front/executed_timeline.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/schedule/schedule_text.h"

namespace phalanx::cli {
namespace {

using observe::TraceFile;
using observe::TraceFileSpan;
using schedule::ExecutedPass;

std::optional<std::int64_t> step_number(const TraceFileSpan& span) {
  constexpr std::string_view kName = "step ";
  if (span.category != "step" || !span.name.starts_with(kName)) return std::nullopt;
  const char* const end = span.name.data() + span.name.size();
  std::int64_t number = 0;
  const auto [rest, error] = std::from_chars(span.name.data() + kName.size(), end, number);
  if (error != std::errc{} || rest != end) return std::nullopt;  // "step 3, not finished"
  return number;
}

std::set<std::int64_t> steps_of(const TraceFile& file) {
  std::set<std::int64_t> steps;
  for (const TraceFileSpan& span : file.spans) {
    if (const auto number = step_number(span)) steps.insert(*number);
  }
  return steps;
}

// The requested step, or the last one that all ranks have.
std::int64_t choose_step(const std::vector<TraceFile>& traces, std::optional<std::int64_t> wanted) {
  std::set<std::int64_t> common = steps_of(traces.front());
  for (const TraceFile& file : traces) {
    const auto here = steps_of(file);
    std::erase_if(common, [&](std::int64_t step) { return !here.contains(step); });
  }
  if (common.empty()) throw Error("no step was finished in the traces of all ranks");
  if (!wanted) return *common.rbegin();
  if (common.contains(*wanted)) return *wanted;
  throw Error(fmt::format("step {} is not in the traces of all ranks: they have {}", *wanted, fmt::join(common, ", ")));
}

std::vector<ExecutedPass> passes_of(const TraceFile& file, std::int64_t step, double epoch) {
  const auto around = std::ranges::find_if(file.spans, [&](const auto& span) { return step_number(span) == step; });
  std::vector<ExecutedPass> passes;
  const double offset = file.epoch_seconds - epoch;
  for (const TraceFileSpan& span : file.spans) {
    if (span.category != "pass" || span.begin_seconds < around->begin_seconds ||
        span.end_seconds > around->end_seconds) {
      continue;
    }
    passes.push_back({schedule::parse_action(span.name), offset + span.begin_seconds, offset + span.end_seconds});
  }
  std::ranges::sort(passes, {}, &ExecutedPass::start);
  return passes;
}

}  // namespace

ExecutedStep executed_step(const std::vector<TraceFile>& traces, const ExecutedStepOptions& options) {
  ExecutedStep result;
  result.step = choose_step(traces, options.step);
  // Ranks with the same stages are in different pipelines. They are assigned to the pipelines in the order of their
  // ranks.
  std::map<std::set<int>, std::vector<std::size_t>> holders;
  std::vector<std::vector<ExecutedPass>> passes;
  for (const TraceFile& file : traces) {
    passes.push_back(passes_of(file, result.step, traces.front().epoch_seconds));
    std::set<int> stages;
    for (const ExecutedPass& pass : passes.back()) stages.insert(pass.action.stage);
    if (stages.empty()) {
      throw Error(
          fmt::format("step {} of rank {} has no passes of a pipeline: expected the traces of a run with "
                      "parallelism.pipeline_parallel_degree above 1",
                      result.step, file.rank));
    }
    holders[stages].push_back(passes.size() - 1);
  }
  const std::size_t pipelines = holders.begin()->second.size();
  for (const auto& [stages, ranks] : holders) {
    if (ranks.size() == pipelines) continue;
    throw Error(fmt::format("{} ranks have the stages {}, and {} the stages {}: the trace of a rank is missing",
                            ranks.size(), fmt::join(stages, " "), pipelines, fmt::join(holders.begin()->first, " ")));
  }
  result.pipelines = static_cast<int>(pipelines);
  double longest = -1.0;
  for (std::size_t p = 0; p < pipelines; ++p) {
    std::vector<int> ranks;
    std::vector<std::vector<ExecutedPass>> rows;
    for (const auto& [stages, all] : holders) {  // sorted by their first stage, which is the order of the ranks
      ranks.push_back(traces[all[p]].rank);
      rows.push_back(passes[all[p]]);
    }
    schedule::Timeline timeline =
        schedule::make_timeline(options.schedule ? *options.schedule : schedule::schedule_of(rows), rows);
    if (timeline.executed.makespan <= longest) continue;
    longest = timeline.executed.makespan;
    result.ranks = std::move(ranks);
    result.timeline = std::move(timeline);
  }
  return result;
}

void print_executed(const ExecutedStep& executed) {
  fmt::print("step {}", executed.step);
  if (executed.pipelines > 1) {
    fmt::print(", the slowest of {} pipelines: ranks {}", executed.pipelines, fmt::join(executed.ranks, ", "));
  }
  fmt::print("\n{}", schedule::to_text(executed.timeline));
}

}  // namespace phalanx::cli
