// Measures the cost of loading weights, compared with reading their file once.
//
//   phalanx launch -n 2 -- load_speed [--megabytes 500] [--rounds 7] [--folder DIR]
//
// A Llama of as many bytes in fp32 is written twice: as Hugging Face's model.safetensors and as a step of ours. Each
// round reads the file once with read() into one buffer of 8 MiB (rank 0), then loads it: in shards (FSDP, half on each
// of two ranks), and whole on every rank (data parallelism). The slowest rank counts. "from the disk": the file's pages
// have been dropped from the cache before (posix_fadvise, DONTNEED), for every rank; "from the cache": not dropped.
// Memory is a rank's own memory plus what it shares with other ranks (RssAnon and RssShmem, read each millisecond): the
// peak while it loads, less what it had before it made its model. Pages of the mapped file belong to the kernel's
// cache.
#include <ATen/ops/full.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/config/hf_names.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/fsdp/fully_shard.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;

std::int64_t own_bytes() {
  std::ifstream status("/proc/self/status");
  std::int64_t kib = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:") || line.starts_with("RssShmem:"))
      kib += std::stoll(line.substr(line.find(':') + 1));
  }
  return kib * 1024;
}

/// The peak of own_bytes() during its lifetime.
class PeakOfOwnBytes {
 public:
  PeakOfOwnBytes()
      : watcher_([this](const std::stop_token& stop) {
          while (!stop.stop_requested()) {
            most_ = std::max<std::int64_t>(most_, own_bytes());
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        }) {}
  std::int64_t finish() {
    watcher_.request_stop();
    watcher_.join();
    return std::max<std::int64_t>(most_, own_bytes());
  }

 private:
  std::atomic<std::int64_t> most_{0};
  std::jthread watcher_;
};

struct Open {
  explicit Open(const std::filesystem::path& path) : fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd < 0) throw Error("cannot open " + path.string());
  }
  ~Open() { ::close(fd); }
  int fd;
};

void drop_from_cache(const std::filesystem::path& path) {
  const Open file(path);
  ::fsync(file.fd);
  ::posix_fadvise(file.fd, 0, 0, POSIX_FADV_DONTNEED);
}

void read_once(const std::filesystem::path& path) {
  const Open file(path);
  static std::vector<char> buffer(8 << 20);
  while (::read(file.fd, buffer.data(), buffer.size()) > 0) {
  }
}

models::LlamaConfig model_of(std::int64_t megabytes) {
  models::LlamaConfig config{.dim = 768,
                             .n_layers = 1,
                             .n_heads = 12,
                             .n_kv_heads = 12,
                             .ffn_hidden = 2048,
                             .vocab_size = 32000,
                             .max_seq_len = 1024};
  while (config.parameter_count() * 4 < megabytes * 1'000'000) ++config.n_layers;
  return config;
}

struct Figures {
  std::vector<double> seconds;
  double memory = 0;  // at the peak, relative to the rank's part of the model; the largest of the ranks'
};

int run(int argc, char** argv) try {
  std::int64_t megabytes = 500;
  int rounds = 7;
  std::string folder;
  CLI::App app("Loading weights beside reading their file once");
  app.add_option("--megabytes", megabytes)->check(CLI::Range(200, 1'000'000));
  app.add_option("--rounds", rounds)->check(CLI::Range(1, 1000));
  app.add_option("--folder", folder, "of the files; they are removed at the end");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const ProcessContext context = init_from_environment({.device = "cpu"});
  Communicator& world = *context.world;
  const std::unique_ptr<TempDirectory> scratch =
      folder.empty() && context.rank == 0 ? std::make_unique<TempDirectory>("load-speed") : nullptr;
  if (folder.empty()) folder = world.broadcast_bytes(scratch ? scratch->path().string() : "");
  const std::filesystem::path hf = std::filesystem::path(folder) / "hf",
                              steps = std::filesystem::path(folder) / "steps";
  const models::LlamaConfig config = model_of(megabytes);
  const LoadWeightsOptions names{.key_mapping = models::llama_hf_name};
  std::filesystem::path step;
  if (context.rank == 0) {
    models::Llama model(config);
    nn::initialise(model, 1);
    std::filesystem::create_directories(hf);
    export_weights(hf / "model.safetensors", nn::named_parameters(model), {.key_mapping = models::llama_hf_name},
                   posix_file_system());
    TrainState state;
    state.tensors = with_prefix("model.", nn::named_parameters(model));
    step = CheckpointManager(steps).save(state, 1).path;
  }
  step = world.broadcast_bytes(step.string());
  std::filesystem::path step_file;
  for (const auto& entry : std::filesystem::directory_iterator(step))
    if (entry.path().extension() == ".safetensors") step_file = entry.path();

  /// One load by all ranks, from the construction of the model to its last byte. The time is only that of loading.
  const auto load = [&](bool shards, bool ours, Figures& figures) {
    ::malloc_trim(0);  // frees what the previous load has left
    const std::int64_t before = own_bytes();
    models::Llama model(config, {.without_memory = shards});
    std::unique_ptr<FullyShardedDataParallel> sharded;
    std::vector<NamedTensor> tensors = nn::named_parameters(model);
    if (shards) {
      sharded = std::make_unique<FullyShardedDataParallel>(
          model, DeviceMesh(context.world, {{"dp_shard", context.world_size}}));
      tensors = sharded->parameters();
    }
    std::int64_t share = 0;
    for (const auto& named : tensors) share += static_cast<std::int64_t>(named.tensor.nbytes());
    PeakOfOwnBytes peak;
    world.barrier();
    const auto begin = Clock::now();
    if (ours) {
      TrainState state;
      state.tensors = with_prefix("model.", tensors);
      CheckpointManager(steps, {}, context.world).load(step, state);
    } else {
      load_weights(hf, tensors, names);
    }
    world.barrier();
    figures.seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    at::Tensor memory =
        at::full({1}, static_cast<double>(peak.finish() - before) / static_cast<double>(share), at::kDouble);
    world.all_reduce(memory, {.op = ReduceOp::max});
    figures.memory = std::max(figures.memory, memory.item().toDouble());
  };

  const std::int64_t file_bytes = static_cast<std::int64_t>(std::filesystem::file_size(hf / "model.safetensors"));
  if (context.rank == 0)
    fmt::print("{} parameters, files of {:.0f} MB, {} ranks, {} rounds\n{:<58} {:>9} {:>9} {:>7} {:>12}\n",
               config.parameter_count(), static_cast<double>(file_bytes) * 1e-6, context.world_size, rounds, "",
               "median, s", "least, s", "ratio", "peak / share");
  for (const bool from_disk : {true, false}) {
    std::map<std::string, Figures> all;
    const auto timed_read = [&](const std::filesystem::path& file) {
      world.barrier();
      if (from_disk && context.rank == 0) drop_from_cache(file);
      world.barrier();
      const auto begin = Clock::now();
      if (context.rank == 0) read_once(file);
      all["0read() of the file, once, on rank 0"].seconds.push_back(
          std::chrono::duration<double>(Clock::now() - begin).count());
    };
    for (int round = 0; round < rounds; ++round) {
      timed_read(hf / "model.safetensors");
      for (const bool ours : {false, true}) {
        for (const bool shards : {true, false}) {
          world.barrier();
          if (from_disk && context.rank == 0) drop_from_cache(ours ? step_file : hf / "model.safetensors");
          world.barrier();
          load(shards, ours,
               all[fmt::format("{}{}, {}", ours ? "2a step of ours (hashes checked)" : "1Hugging Face's file", "",
                               shards ? "in shards" : "whole on every rank")]);
        }
      }
    }
    const auto median = [](std::vector<double> values) {
      std::ranges::sort(values);
      return values[values.size() / 2];
    };
    const double once = median(all.begin()->second.seconds);
    for (auto& [name, figures] : all) {
      if (context.rank != 0) continue;
      fmt::print("{:<58} {:>9.3f} {:>9.3f} {:>7.2f} {:>12}\n",
                 fmt::format("{}: {}", from_disk ? "disk" : "cache", name.substr(1)), median(figures.seconds),
                 std::ranges::min(figures.seconds), median(figures.seconds) / once,
                 figures.memory == 0 ? "" : fmt::format("{:.3f}", figures.memory));
    }
    std::fflush(stdout);
  }
  world.barrier();
  return 0;
} catch (const Error& error) {
  if (!report_error_to_launcher(error)) fmt::print(stderr, "load_speed: {}\n", error.what());
  return error.exit_status();
}

}  // namespace
}  // namespace phalanx

int main(int argc, char** argv) { return phalanx::run(argc, argv); }
