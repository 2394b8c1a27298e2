// A rank that meets the others, sums over them, and says how it was done: run by the tests under every launcher.
//
//   launch_test_worker [--backend B] [--method M --rank R --world-size W] [--timeout-ms T] [--spawn N]
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/quick_exit.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/spawn.h"
#include "phalanx/launch/worker_report.h"

int main(int argc, char** argv) {
  phalanx::skip_earlier_static_destructors();
  try {
    phalanx::InitOptions options;
    int spawned = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
      const std::string name = argv[i], value = argv[i + 1];
      if (name == "--backend") options.backend = value;
      if (name == "--method") options.method = value;
      if (name == "--rank") options.rank = std::atoi(value.c_str());
      if (name == "--world-size") options.world_size = std::atoi(value.c_str());
      if (name == "--spawn") spawned = std::atoi(value.c_str());
      if (name == "--timeout-ms")
        options.communicator.first_timeout = std::chrono::milliseconds(std::atoi(value.c_str()));
    }
    if (spawned > 0) {
      if (const auto status = phalanx::spawn_local_ranks(spawned, argc, argv)) return *status;
    }
    auto context = phalanx::init_from_environment(options);
    at::Tensor x = at::full({1000}, context.rank + 1.0, at::kFloat);
    context.world->all_reduce(x);
    fmt::print("rank {} of {}, local {} of {}, {} on {}, sum {}\n", context.rank, context.world_size,
               context.local_rank, context.local_world_size, context.world->backend_name(), context.device.str(),
               x.const_data_ptr<float>()[999]);
    return 0;
  } catch (const phalanx::Error& error) {
    if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "{}\n", error.what());
    return error.exit_status();
  }
}
