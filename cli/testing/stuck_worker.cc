// A rank of a small job that gets stuck, for the tests of `phalanx trace analyze`.
//
//   stuck_worker MODE [TIMEOUT_MS]      TIMEOUT_MS: the timeout of the operations after the first all_reduce
//   absent     rank 1 never calls the second all_reduce of the world
//   mismatch   rank 1 calls it with another type
//   finish     no rank gets stuck; every rank writes its file to $PHALANX_COMM_TRACE_DIR, if that is set, at the end
//   group      ranks 1 and 2 form a group in which rank 2 never calls the operation; rank 0 waits for both
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"

namespace {

[[noreturn]] void do_something_else_for_ever() {
  for (;;) ::pause();
}

void run(const std::string& mode, std::chrono::milliseconds timeout) {
  const auto context = phalanx::init_from_environment({.communicator = {.timeout = timeout}});
  phalanx::Communicator& world = *context.world;
  at::Tensor x = at::full({8}, 1.0F);
  world.all_reduce(x);
  const bool in_pair = context.rank > 0 && mode == "group";
  const auto pair = world.split(in_pair ? 0 : -1, context.rank, "pair");
  // In mode `group` rank 0 has a longer timeout, so the pair times out first.
  if (mode != "group" || context.rank != 0) world.mark_started();
  if (in_pair && context.rank == 2) do_something_else_for_ever();
  if (in_pair) pair->barrier();
  if (mode == "absent" && context.rank == 1) do_something_else_for_ever();
  if (mode == "mismatch" && context.rank == 1) x = at::full({8}, 1.0, at::kDouble);
  world.all_reduce(x);
  world.barrier();
  if (const auto folder = phalanx::env_string("PHALANX_COMM_TRACE_DIR"))
    world.dump_flight_recorder(fmt::format("{}/rank_{}.json", *folder, context.rank));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? argv[1] : "finish", std::chrono::milliseconds(argc > 2 ? std::atoi(argv[2]) : 60'000));
    return 0;
  } catch (const phalanx::Error& error) {
    if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "{}\n", error.what());
    return error.exit_status();
  }
}
