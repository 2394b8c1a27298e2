#include "cli/bench_arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/base/parse_text.h"

namespace phalanx::cli {

const std::string_view kBenchHelp = R"(usage: phalanx bench comm [-n N] [options]

Measures the collectives: latency, bandwidth and correctness, for sizes, types and backends, in one table.

  -n, --nproc-per-node N   start N ranks on this node (default 2). Without -n under phalanx launch, torchrun or srun:
                           the ranks that they started
      --ops LIST           of all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter, all_to_all,
                           sendrecv (to the next rank, from the one before), pingpong (ranks 0 and 1, half of the round
                           trip), barrier; or all. Default: all_reduce, all_gather, reduce_scatter, broadcast,
                           all_to_all, pingpong
      --backends LIST      auto, shm, symmetric (shm, buffers in symmetric memory), heap (shm, tensors in the shared
                           heap), gloo, local (threads of one process), c10d (torch's own gloo, for comparison), and at
                           most one other that the library has. They take turns in one run. Default: auto
  -b, --min-bytes SIZE     sizes of the whole array: from (default 4K)
  -e, --max-bytes SIZE     to (default 64M; the same as -b where only that is given and larger)
  -f, --step-factor F      each F times the one before (default 4)
  -i, --step-bytes SIZE    or each SIZE larger
      --sizes LIST         or just these: 4K,64K,1M
  -d, --datatype LIST      float32 float64 float16 bfloat16 int32 int64 uint8 bool, or all (default float32)
  -o, --reduce-op LIST     sum avg min max product, or all (default sum)
      --place in|out|both  result in the input's buffer or in another, for the verbs that have both forms (default out)
  -r, --root RANK          of broadcast, reduce, gather and scatter (default 0)
  -w, --warmup N           calls before the timed ones (default 3)
      --iters N            timed calls (nccl-tests' -n). Default: what fits into --budget-s, 7 to 5,000
      --budget-s S         seconds for each round of each backend (default 0.2)
      --rounds N           the backends take turns this often; the round with the least median stands (default 3)
  -c, --check 0|1          one call on known values, before timing (default 1)
      --copy 0|1           measure the copy roofline (default 1)
      --pin [0|1]          rank r to the r-th usable core; for tuning: unfair to backends with helper threads
      --device cpu|cuda    where the buffers are (default cpu)
      --csv FILE, --json FILE, --plot FILE.svg

Times are in microseconds, of the slowest rank; algbw = bytes / p50 and busbw = algbw x nccl-tests' factor in GB/s (1e9
bytes). `wrong` counts elements that were not what they must be. `copy` is the speed at which all ranks at once copy as
many bytes by memcpy, `% copy` the part of it that algbw reaches. Ctrl-C ends the run and still prints and writes what
has been measured. See docs/bench_comm.md.

  phalanx bench comm -n 2 --backends shm,c10d --ops all_reduce --sizes 4K,64K,1M,64M
  phalanx bench comm -n 4 --ops all -b 64K -e 16M -f 16 --json comm.json --plot comm.svg
  torchrun --no-python --nproc-per-node 2 phalanx bench comm --backends gloo
)";

BenchArguments parse_bench_arguments(const Arguments& arguments) {
  BenchArguments parsed;
  measure::CommBenchOptions& options = parsed.options;
  std::string ops, backends, min_bytes, max_bytes, step_bytes, sizes, types, reduce_ops, place;
  double factor = 4;
  int check = 1, copy = 1, pin = 0;
  CLI::App app;
  add_ranks_option(app, parsed.ranks, "-n,--nproc-per-node,--ranks");
  app.add_option("--ops", ops);
  app.add_option("--backends,--backend", backends);
  auto* const from = app.add_option("-b,--min-bytes,--minbytes", min_bytes);
  auto* const to = app.add_option("-e,--max-bytes,--maxbytes", max_bytes);
  auto* const by_factor = app.add_option("-f,--step-factor,--stepfactor", factor);
  auto* const by_bytes = app.add_option("-i,--step-bytes,--stepbytes", step_bytes)->excludes(by_factor);
  app.add_option("--sizes", sizes)->excludes(from)->excludes(to)->excludes(by_factor)->excludes(by_bytes);
  app.add_option("-d,--datatype,--dtype", types);
  app.add_option("-o,--reduce-op,--op", reduce_ops);
  app.add_option("--place", place);
  app.add_option("-r,--root", options.root);
  app.add_option("-w,--warmup,--warmup-iters", options.warmup);
  const auto* const iterations = app.add_option("--iters", options.iterations);
  app.add_option("--budget-s", options.budget_seconds);
  app.add_option("--rounds", options.rounds);
  app.add_option("-c,--check", check);
  app.add_option("--copy", copy);
  auto* const pinned = app.add_option("--pin", pin)->expected(0, 1);
  app.add_option("--device", options.device);
  app.add_option("--csv", parsed.csv);
  app.add_option("--json", parsed.json);
  app.add_option("--plot", parsed.plot);
  parse_options(app, arguments);
  if (iterations->count() > 0) require_range("--iters", options.iterations, 1);
  for (const auto& [name, value] : {std::pair{"--check", check}, {"--copy", copy}, {"--pin", pin}}) {
    if (value != 0 && value != 1) throw UsageError(fmt::format("{} is {}: expected 0 or 1", name, value));
  }
  if (!ops.empty()) options.verbs = measure::parse_verbs("--ops", ops);
  if (!backends.empty()) options.backends = split_list(backends);
  if (!types.empty()) options.types = measure::parse_types("--datatype", types);
  if (!reduce_ops.empty()) options.ops = measure::parse_ops("--reduce-op", reduce_ops);
  if (!place.empty()) options.places = measure::parse_places("--place", place);
  options.check = check == 1;
  options.copy = copy == 1;
  options.pin = pinned->count() > 0 && (pinned->results().empty() || pinned->results().front().empty() || pin == 1);

  if (!sizes.empty()) {
    for (const std::string& size : split_list(sizes)) options.sizes.push_back(parse_size("--sizes", size));
  } else {
    const std::int64_t low = parse_size("--min-bytes", min_bytes.empty() ? "4K" : min_bytes);
    const std::int64_t high =
        max_bytes.empty() ? std::max(low, std::int64_t{64} << 20) : parse_size("--max-bytes", max_bytes);
    const std::int64_t step = step_bytes.empty() ? 0 : parse_size("--step-bytes", step_bytes);
    if (!step_bytes.empty() && step < 1) throw UsageError("--step-bytes is 0: expected at least 1");
    options.sizes = measure::size_range(low, high, factor, step);
  }
  return parsed;
}

}  // namespace phalanx::cli
