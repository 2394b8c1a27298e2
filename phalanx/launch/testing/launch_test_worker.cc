// A rank that joins the rendezvous, sums over all ranks, and prints how this was done. The tests run it under every
// launcher.
//
//   launch_test_worker [--backend B] [--method M --rank R --world-size W] [--timeout-ms T] [--spawn N]
//                      [--killed-once RANK] [--patient true] [--until-world N] [--notes FOLDER] [--shared-heap
//                      true|false]
//
// --killed-once: in the first attempt this rank is killed between two sums, while the others continue to sum.
// --patient: the others do not fail then, but wait until their launcher ends them.
// --until-world: with fewer than N ranks the sums continue until the launcher ends the ranks.
// --notes: the sums continue until FOLDER/go exists. FOLDER/sum.<rank> shows that the rank has computed a sum.
// FOLDER/error.<rank> contains its error.
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/quick_exit.h"
#include "phalanx/comm/backends/local_shm/shared_heap.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/spawn.h"
#include "phalanx/launch/supervisor/worker_report.h"

namespace {

// Writes a file that appears complete.
template <class T>
void note(const std::string& folder, const std::string& name, int rank, const T& value) {
  const std::string path = fmt::format("{}/{}.{}", folder, name, rank);
  std::ofstream(path + ".new") << value;
  std::filesystem::rename(path + ".new", path);
}

// True if rank 0 has seen the file FOLDER/go. The result is the same on all ranks.
bool is_time_to_end(phalanx::Communicator& world, const std::string& folder) {
  usleep(2000);
  at::Tensor seen = at::full({1}, world.rank() == 0 && std::filesystem::exists(folder + "/go") ? 1.0 : 0.0, at::kFloat);
  try {
    world.all_reduce(seen);
  } catch (const phalanx::Error& error) {
    // Write it before the shutdown, which takes seconds if the store does not answer.
    note(folder, "error", world.rank(), error.what());
    throw;
  }
  return seen.const_data_ptr<float>()[0] > 0;
}

}  // namespace

int main(int argc, char** argv) {
  phalanx::skip_earlier_static_destructors();
  try {
    std::string notes;
    phalanx::InitOptions options;
    int spawned = 0, killed = -1, until_world = 0;
    bool is_patient = false;
    for (int i = 1; i + 1 < argc; i += 2) {
      const std::string name = argv[i], value = argv[i + 1];
      if (name == "--backend") options.backend = value;
      if (name == "--method") options.method = value;
      if (name == "--rank") options.rank = std::atoi(value.c_str());
      if (name == "--world-size") options.world_size = std::atoi(value.c_str());
      if (name == "--spawn") spawned = std::atoi(value.c_str());
      if (name == "--killed-once") killed = std::atoi(value.c_str());
      if (name == "--patient") is_patient = value == "true";
      if (name == "--until-world") until_world = std::atoi(value.c_str());
      if (name == "--notes") notes = value;
      if (name == "--shared-heap") options.shared_heap = value == "true";
      if (name == "--timeout-ms")
        options.communicator.first_timeout = std::chrono::milliseconds(std::atoi(value.c_str()));
    }
    if (spawned > 0) {
      if (const auto status = phalanx::spawn_local_ranks(spawned, argc, argv)) return *status;
    }
    auto context = phalanx::init_from_environment(options);
    at::Tensor x;
    // The rank itself finds out which attempt this is: launchers may count differently for the other ranks.
    bool is_killed = killed >= 0;
    if (is_killed) {
      const bool is_first_attempt = phalanx::env_string("TORCHELASTIC_RESTART_COUNT").value_or("0") == "0";
      x = at::full({1}, context.rank == killed && is_first_attempt ? 1.0 : 0.0, at::kFloat);
      context.world->all_reduce(x);
      is_killed = x.const_data_ptr<float>()[0] > 0;
    }
    for (int sums = 1;; ++sums) {
      x = at::full({1000}, context.rank + 1.0, at::kFloat);
      try {
        context.world->all_reduce(x);
      } catch (const phalanx::CommError&) {
        if (!is_killed || !is_patient) throw;
        for (;;) pause();
      }
      if (sums == 1 && context.rank == 0) fmt::print(stderr, "{} ranks add up\n", context.world_size);
      if (is_killed && context.rank == killed && sums == 10) raise(SIGKILL);
      if (!notes.empty() && sums == 1) note(notes, "sum", context.rank, getpid());
      if (!notes.empty())
        while (!is_time_to_end(*context.world, notes)) {
        }
      if (!is_killed && context.world_size >= until_world) break;
    }
    fmt::print("rank {} of {}, local {} of {}, {} on {}, sum {}\n", context.rank, context.world_size,
               context.local_rank, context.local_world_size, context.world->backend_name(), context.device.str(),
               x.const_data_ptr<float>()[999]);
    const at::Tensor large = at::full({100'000}, 1.0);
    if (phalanx::SharedHeap::owner_of(large.const_data_ptr())) fmt::print("rank {} shares its heap\n", context.rank);
    return 0;
  } catch (const phalanx::Error& error) {
    if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "{}\n", error.what());
    return error.exit_status();
  }
}
