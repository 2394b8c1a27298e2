#include "cli/front/schedule_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <utility>

#include "cli/front/executed_timeline.h"
#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/nearest.h"
#include "phalanx/base/parse_text.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/dataflow.h"
#include "phalanx/schedule/draw.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/simulate.h"
#include "phalanx/schedule/transfers.h"
#include "phalanx/schedule/validate.h"

namespace phalanx::cli {

const std::string_view kScheduleHelp = R"(usage: phalanx schedule NAME --ranks P --micro-batches M [options]
       phalanx schedule --from FILE.csv [options]
       phalanx schedule --executed FOLDER [--step N] [--from FILE.csv] [--svg FILE]
       phalanx schedule --compare --ranks P --micro-batches M [--stages-per-rank V] [--times ...]

Simulates a pipeline schedule and says how long each rank waits and how many activations it keeps alive. NAME is GPipe,
1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble (ZB1P), ZBVZeroBubble (ZBV) or DualPipeV, in any case.

  --ranks P                 ranks of the pipeline
  --micro-batches M         micro-batches of a step
  --stages-per-rank V       where the schedule leaves it open (2 where not given)
  --from FILE.csv           the schedule in this file, instead: one line a rank, cells such as 2F0 (torch's form)
  --times F=1,B=2,I=1,W=1,send=0
                            times of a stage's forward, backward, input half, weight half, and of a transfer between
                            ranks, in any unit. Not given: F=1, B=I+W; I and W the half of B; send=0
  --table                   print the schedule: a row a step, a column a rank
  --transfers               place SEND and RECV in what is printed or written
  --validate                say what has been checked: every input is there, every transfer is met, nothing waits
                            for ever
  --max-live N[,N...]       with --validate: no rank (each rank) keeps more live activations
  --csv FILE                write the schedule
  --svg FILE                write a picture of it
  --executed FOLDER         a step as it ran, beside the same schedule simulated with the times that its passes took:
                            from the traces of a pipeline's ranks, which a training run writes with
                            --profiling.enable_profiling to profile_traces/iteration_N in its folder
  --step N                  of --executed: this step of the traces (the last one where not given)
  --compare                 all schedules in one table. The times are then those of all stages of a rank together

  phalanx schedule 1F1B --ranks 4 --micro-batches 8 --table
  phalanx schedule zbv --ranks 4 --micro-batches 8 --times F=1,I=1.2,W=0.8,send=0.1 --svg zbv.svg
  phalanx schedule --from mine.csv --validate
  phalanx schedule --compare --ranks 4 --micro-batches 8
  phalanx schedule --executed outputs/profile_traces/iteration_10 --svg step.svg
)";

namespace {

struct ScheduleArguments {
  schedule::ScheduleOptions options;
  schedule::Times times;
  std::string times_text;  // all times, in the form in which they are used
  std::string from, csv, svg, executed;
  std::optional<std::int64_t> step;
  std::vector<int> max_live;
  bool table = false, transfers = false, validate = false, compare = false;
};

void parse_times(const std::string& text, ScheduleArguments& arguments) {
  std::optional<double> f, b, i, w, send;
  const std::vector<std::pair<std::string, std::optional<double>*>> known = {
      {"F", &f}, {"B", &b}, {"I", &i}, {"W", &w}, {"send", &send}};
  for (const std::string& part : text.empty() ? std::vector<std::string>{} : split_list(text)) {
    const std::size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const auto found = std::find_if(known.begin(), known.end(), [&](const auto& entry) { return entry.first == name; });
    if (found == known.end() || equals == std::string::npos) {
      throw UsageError(fmt::format("--times has '{}'{}: expected F=, B=, I=, W= and send=, separated by commas", part,
                                   found == known.end() ? did_you_mean(name, {"F", "B", "I", "W", "send"}) : ""));
    }
    *found->second = parse_whole<double>(part.substr(equals + 1));
    if (!(found->second->value_or(-1) >= 0) || std::isinf(**found->second)) {
      throw UsageError(fmt::format("--times has '{}': expected a number, 0 or more", part));
    }
  }
  schedule::PassTimes& times = arguments.times.common;
  times.forward = f.value_or(1.0);
  times.backward_input = i.value_or(b.value_or(2.0) / 2.0);
  times.backward_weight = w.value_or(b.value_or(2.0) / 2.0);
  times.backward = b.value_or(times.backward_input + times.backward_weight);
  arguments.times.transfer = send.value_or(0.0);
  arguments.times_text = fmt::format("F={:.6g} B={:.6g} I={:.6g} W={:.6g} send={:.6g}", times.forward, times.backward,
                                     times.backward_input, times.backward_weight, arguments.times.transfer);
}

std::vector<int> parse_max_live(const std::string& text) {
  std::vector<int> bounds;
  for (const std::string& part : split_list(text)) {
    const auto bound = parse_whole<int>(part);
    if (!bound) throw UsageError(fmt::format("--max-live has '{}': expected whole numbers, such as 4 or 4,3", part));
    bounds.push_back(*bound);
  }
  return bounds;
}

ScheduleArguments parse_schedule(const Arguments& arguments) {
  ScheduleArguments parsed;
  std::string times, max_live;
  CLI::App app;
  app.option_defaults()->disable_flag_override();
  app.add_option("name", parsed.options.name);
  const auto* const ranks = app.add_option("--ranks", parsed.options.ranks);
  const auto* const micro_batches = app.add_option("--micro-batches", parsed.options.micro_batches);
  const auto* const stages = app.add_option("--stages-per-rank", parsed.options.stages_per_rank);
  const auto* const given_times = app.add_option("--times", times);
  const auto* const given_max_live = app.add_option("--max-live", max_live);
  app.add_option("--from", parsed.from);
  app.add_option("--csv", parsed.csv);
  app.add_option("--svg", parsed.svg);
  app.add_option("--executed", parsed.executed);
  app.add_option("--step", parsed.step);
  app.add_flag("--table", parsed.table);
  app.add_flag("--transfers", parsed.transfers);
  app.add_flag("--validate", parsed.validate);
  app.add_flag("--compare", parsed.compare);
  parse_options(app, arguments);
  if (stages->count() > 0) require_range("--stages-per-rank", parsed.options.stages_per_rank, 1);
  parse_times(times, parsed);
  if (given_max_live->count() > 0) parsed.max_live = parse_max_live(max_live);

  const bool named = !parsed.options.name.empty();
  const bool sized = ranks->count() + micro_batches->count() + stages->count() > 0;
  if (!parsed.executed.empty()) {
    if (named || sized || parsed.compare || parsed.table || parsed.transfers || parsed.validate ||
        given_times->count() > 0 || !parsed.csv.empty()) {
      throw UsageError("--executed goes together with --step, --from and --svg only: the rest is what the traces say");
    }
    return parsed;
  }
  if (parsed.step) throw UsageError("--step is one of the traces of --executed FOLDER: add it");
  if (named + !parsed.from.empty() + parsed.compare != 1) {
    throw UsageError(fmt::format("expected one of NAME ({}), --from FILE.csv and --compare",
                                 fmt::join(schedule::schedule_names(), ", ")));
  }
  if (!parsed.from.empty() && sized) {
    throw UsageError("--ranks, --micro-batches and --stages-per-rank are what the file of --from says: leave them out");
  }
  if (parsed.from.empty() && (ranks->count() == 0 || micro_batches->count() == 0)) {
    throw UsageError("expected --ranks P and --micro-batches M");
  }
  if (parsed.compare &&
      (parsed.table || parsed.transfers || parsed.validate || !parsed.csv.empty() || !parsed.svg.empty())) {
    throw UsageError(
        "--compare prints its table only: --table, --transfers, --validate, --csv and --svg are of one NAME");
  }
  if (!parsed.max_live.empty() && !parsed.validate) throw UsageError("--max-live is checked by --validate: add it");
  return parsed;
}

std::string percent(double fraction) { return fmt::format("{:.1f} %", 100 * fraction + 0.0); }

void print_summary(const schedule::Schedule& schedule, const schedule::Simulation& result, const std::string& times) {
  fmt::print("{}: {} ranks, {} stages, {} micro-batches; {}\n\n", schedule.name, schedule.ranks(), schedule.stages(),
             schedule.micro_batches, times);
  std::vector<std::string> stages;
  std::size_t width = 6;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    stages.push_back(fmt::format("{}", fmt::join(schedule.stages_of(rank), " ")));
    width = std::max(width, stages.back().size());
  }
  fmt::print("rank  {:<{}}  {:>9}  {:>7}  {:>13}\n", "stages", width, "busy", "waits", "live at most");
  for (std::size_t rank = 0; rank < stages.size(); ++rank) {
    fmt::print("{:>4}  {:<{}}  {:>9.6g}  {:>7}  {:>13}\n", rank, stages[rank], width, result.busy[rank],
               percent(result.bubble_of_rank[rank]), result.peak_live_activations[rank]);
  }
  fmt::print("\nmakespan {:.6g}, bubble {}", result.makespan, percent(result.bubble));
  if (std::abs(result.bubble - result.span_bubble) > 0.0005) {
    fmt::print(" ({} between a rank's first pass and its last)", percent(result.span_bubble));
  }
  fmt::print("\n");
}

void print_validity(const schedule::Schedule& schedule, const ScheduleArguments& arguments) {
  schedule::ValidateOptions options{.transport = schedule::Transport::asynchronous,
                                    .max_live_activations = arguments.max_live};
  const auto ranks = static_cast<std::size_t>(schedule.ranks());
  if (arguments.max_live.size() == 1) options.max_live_activations.assign(ranks, arguments.max_live[0]);
  if (!arguments.max_live.empty() && options.max_live_activations.size() != ranks) {
    throw UsageError(fmt::format("--max-live has {} numbers: expected one for all ranks, or one for each of {}",
                                 arguments.max_live.size(), ranks));
  }
  schedule::check(schedule, options);
  const bool placed = schedule::has_transfers(schedule);
  const schedule::Schedule whole = placed ? schedule : schedule::add_transfers(schedule);
  const bool meets = schedule::validate(whole, {.transport = schedule::Transport::rendezvous}).empty();
  int passes = 0, transfers = 0;
  for (const auto& row : whole.actions) {
    for (const schedule::Action& action : row) {
      schedule::for_each_sub_action(action, [&](const schedule::Action& part) {
        passes += schedule::is_pass(part.kind) ? 1 : 0;
        transfers += schedule::is_send(part.kind) ? 1 : 0;
      });
    }
  }
  fmt::print(
      "valid: {} passes, each once and after its inputs; {} transfers{}, each sent and received in order; no "
      "deadlock{}\n",
      passes, transfers, placed ? "" : " to be placed",
      meets ? ", even where a send waits for its receive" : " as long as a send does not wait for its receive");
  if (!arguments.max_live.empty()) fmt::print("live activations are within the bound on every rank\n");
}

int show(const ScheduleArguments& arguments) {
  schedule::Schedule schedule =
      arguments.from.empty() ? schedule::make_schedule(arguments.options) : schedule::read_csv(arguments.from);
  if (arguments.transfers) schedule = schedule::add_transfers(schedule);
  if (arguments.table) {
    // Steps are shown only for a valid schedule without transfers. Otherwise the actions are listed one below the
    // other.
    const bool steps = !schedule::has_transfers(schedule) && schedule::validate(schedule).empty();
    fmt::print("{}\n", steps ? schedule::to_step_table(schedule) : schedule::to_table(schedule));
    std::fflush(stdout);
  }
  if (arguments.validate) print_validity(schedule, arguments);
  const schedule::Simulation result = schedule::simulate(schedule, arguments.times);
  if (arguments.validate) fmt::print("\n");
  print_summary(schedule, result, arguments.times_text);
  if (!arguments.csv.empty()) {
    write_file(arguments.csv, schedule::to_csv(schedule));
    fmt::print("wrote {}\n", arguments.csv);
  }
  if (!arguments.svg.empty()) {
    write_file(arguments.svg, schedule::to_svg(schedule, result));
    fmt::print("wrote {}\n", arguments.svg);
  }
  return 0;
}

int show_executed(const ScheduleArguments& arguments) {
  ExecutedStepOptions options{.step = arguments.step, .schedule = {}};
  if (!arguments.from.empty()) options.schedule = schedule::read_csv(arguments.from);
  const ExecutedStep executed = executed_step(observe::read_trace_files(arguments.executed), options);
  print_executed(executed);
  if (!arguments.svg.empty()) {
    write_file(arguments.svg, schedule::to_svg(executed.timeline));
    fmt::print("wrote {}\n", arguments.svg);
  }
  return 0;
}

int compare(const ScheduleArguments& arguments) {
  std::string rows, refused;
  int shown = 0;
  for (const std::string& name : schedule::schedule_names()) {
    schedule::ScheduleOptions options = arguments.options;
    options.name = name;
    // These schedules have a fixed number of stages per rank, so the given number does not apply.
    if (name == "GPipe" || name == "1F1B" || name == "ZBVZeroBubble" || name == "DualPipeV")
      options.stages_per_rank = 0;
    try {
      const schedule::Schedule schedule = schedule::make_schedule(options);
      const int per_rank = schedule.stages() / schedule.ranks();
      schedule::Times times = arguments.times;
      for (double* time : {&times.common.forward, &times.common.backward, &times.common.backward_input,
                           &times.common.backward_weight}) {
        *time /= per_rank;
      }
      const schedule::Simulation result = schedule::simulate(schedule, times);
      const int live = *std::max_element(result.peak_live_activations.begin(), result.peak_live_activations.end());
      rows += fmt::format("{:<22}  {:>13}  {:>8.6g}  {:>6}  {:>16}  {:>9.4g}\n", name, per_rank, result.makespan,
                          percent(result.bubble), live, static_cast<double>(live) / per_rank);
      ++shown;
    } catch (const ConfigError& error) {
      rows += fmt::format("{:<22}  {:>13}  {:>8}  {:>6}  {:>16}  {:>9}\n", name, "-", "-", "-", "-", "-");
      refused += fmt::format("{}\n", error.what());
    }
  }
  if (shown == 0) throw ConfigError(refused.substr(0, refused.find('\n')));
  fmt::print("{} ranks, {} micro-batches; all stages of a rank together: {}\n\n", arguments.options.ranks,
             arguments.options.micro_batches, arguments.times_text);
  fmt::print("{:<22}  {:>13}  {:>8}  {:>6}  {:>16}  {:>9}\n{}", "schedule", "stages a rank", "makespan", "bubble",
             "live activations", "/ stages", rows);
  fmt::print(
      "\nLive activations, on the rank that has most: of one micro-batch in one stage; divided by the stages of a "
      "rank they\ntell the memory.\n");
  if (!refused.empty()) fmt::print("\n{}", refused);
  return 0;
}

}  // namespace

int schedule_command(const Arguments& arguments) {
  const ScheduleArguments parsed = parse_schedule(arguments);
  if (!parsed.executed.empty()) return show_executed(parsed);
  return parsed.compare ? compare(parsed) : show(parsed);
}

}  // namespace phalanx::cli
