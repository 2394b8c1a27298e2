// Measures the cost of saving: a synchronous save, and how long an asynchronous save blocks its caller.
//
//   checkpoint_speed [--megabytes 500] [--ranks 1] [--rounds 5] [--folder DIR]
//
// The state is float32 tensors of 16 MiB, in rows over the ranks (threads of this process). Each round saves once in
// either way, one after the other; the slowest rank counts. `reserve` is the time to allocate the memory for the copy.
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/comm/backends/local_shm/local.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Round {
  double save = 0, stall = 0, rest = 0;  // seconds: save(), async_save(), and then finish()
};

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

}  // namespace

int main(int argc, char** argv) {
  std::int64_t megabytes = 500;
  int ranks = 1, count = 5;
  std::string folder;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--megabytes") megabytes = std::atoll(argv[i + 1]);
    if (name == "--ranks") ranks = std::atoi(argv[i + 1]);
    if (name == "--rounds") count = std::atoi(argv[i + 1]);
    if (name == "--folder") folder = argv[i + 1];
  }
  if (megabytes < 1 || ranks < 1 || count < 1) {
    std::fputs("checkpoint_speed [--megabytes N] [--ranks N] [--rounds N] [--folder DIR]\n", stderr);
    return 2;
  }
  const phalanx::TempDirectory scratch("checkpoint-speed");
  if (folder.empty()) folder = (scratch.path() / "checkpoint").string();
  std::vector<Round> rounds(static_cast<std::size_t>(count));
  std::mutex mutex;
  phalanx::run_local_ranks(ranks, [&](const std::shared_ptr<phalanx::Communicator>& comm) {
    phalanx::TrainState state;
    const phalanx::MeshShape mesh({{"dp", ranks}});
    constexpr std::int64_t kRows = 4096, kColumns = 1024;
    for (std::int64_t i = 0; i < megabytes * 1'000'000 / (kRows * kColumns * 4); ++i) {
      const auto name = fmt::format("model.{}", i);
      const auto shard = std::make_shared<phalanx::Shard>(phalanx::Shard{
          {name, {kRows, kColumns}, phalanx::DataType::f32, mesh, {.splits = {{"dp", 0, {}}}}}, comm->rank()});
      state.tensors.push_back({name, at::full(shard->box().shape, static_cast<double>(i)), shard});
    }
    phalanx::CheckpointManager checkpoints(folder, {.keep_latest_k = 1}, comm);
    const auto begin_reserve = Clock::now();
    checkpoints.reserve(state);
    if (comm->rank() == 0) fmt::print("reserve: {:.3f} s\n", seconds_since(begin_reserve));
    for (int i = 0; i < count; ++i) {
      comm->barrier().wait();
      const auto begin = Clock::now();
      checkpoints.save(state, 2 * i);
      const double save = seconds_since(begin);
      comm->barrier().wait();
      const auto begin_async = Clock::now();
      const double stall = checkpoints.async_save(state, 2 * i + 1).stall_seconds;
      checkpoints.finish();
      const double rest = seconds_since(begin_async) - stall;
      const std::lock_guard lock(mutex);
      auto& round = rounds[static_cast<std::size_t>(i)];
      round = {std::max(round.save, save), std::max(round.stall, stall), std::max(round.rest, rest)};
    }
  });
  fmt::print("{} MB, {} rank{}\nround   save s   stall s   in the background s   stall / save\n", megabytes, ranks,
             ranks == 1 ? "" : "s");
  for (std::size_t i = 0; i < rounds.size(); ++i)
    fmt::print("{:>5}  {:>7.3f}   {:>7.3f}   {:>19.3f}   {:>11.1f} %\n", i + 1, rounds[i].save, rounds[i].stall,
               rounds[i].rest, 100 * rounds[i].stall / rounds[i].save);
  return 0;
}
