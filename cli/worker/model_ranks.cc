#include "cli/worker/model_ranks.h"

#include <ATen/Context.h>
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/peft_adapter.h"
#include "phalanx/checkpoint/files/weights_identity.h"
#include "phalanx/launch/rendezvous/worker_environment.h"
#include "phalanx/models/config/model_identity.h"
#include "phalanx/models/llama.h"
#include "phalanx/store/hash_store.h"
#include "phalanx/train/ranks/first_rank.h"
#include "phalanx/train/ranks/rank_agreement.h"

namespace phalanx::cli {
namespace {

// Ranks that have finished wait for the others. The heartbeat detects ranks that are gone.
constexpr std::chrono::hours kPatience{24 * 7};

at::Device choose_device(const std::string& name) {
  if (name.empty()) return at::hasCUDA() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  if (name != "cpu" && name != "cuda" && !name.starts_with("cuda:")) {
    throw UsageError(fmt::format("--device is '{}': expected cpu, cuda or cuda:N", name));
  }
  if (name == "cpu") return at::kCPU;
  if (!at::hasCUDA()) throw Error(fmt::format("--device {}: this node or build of libtorch has no CUDA device", name));
  const std::string number = name == "cuda" ? "0" : name.substr(5);
  if (number.empty() || number.size() > 3 || number.find_first_not_of("0123456789") != std::string::npos ||
      std::stoi(number) >= static_cast<int>(at::getNumGPUs())) {
    throw UsageError(fmt::format("--device is '{}': this node has {} CUDA devices", name, at::getNumGPUs()));
  }
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(std::stoi(number)));
}

void require_same_command(Communicator& world, const Arguments& arguments) {
  nlohmann::json mine = nlohmann::json::object();
  for (std::size_t i = 0; i < arguments.size(); ++i) mine[fmt::format("argument {:02}", i + 1)] = arguments[i];
  train::require_same_on_ranks(world, "command", mine, "start every rank with the same arguments");
}

}  // namespace

int ModelRanks::member() const { return static_cast<int>(plan.data_parallel_rank(process.rank)); }

void ModelRanks::barrier() const {
  if (process.world) process.world->barrier();
}

std::vector<std::string> ModelRanks::all_gather(const std::string& bytes) const {
  return process.world ? process.world->all_gather_bytes(bytes) : std::vector{bytes};
}

void ModelRanks::each(const std::function<void()>& work) const {
  process.world ? train::on_every_rank(process.world, work) : work();
}

void ModelRanks::require_same(const std::string& what, const nlohmann::json& mine) const {
  if (process.world) train::require_same_on_ranks(*process.world, what, mine, "give every rank the same files");
}

void ModelRanks::run(const std::function<void()>& body) const {
  try {
    body();
  } catch (const std::exception& error) {
    if (process.world) process.world->abort(error.what());
    throw;
  }
}

std::string read_on_each_rank(const std::string& path) {
  std::error_code error;
  if (read_worker_environment().world_size > 1 && std::filesystem::is_fifo(path, error)) {
    throw DataError(fmt::format(
        "{} is a pipe, and each rank reads it for itself, so only one would find anything: write it to a file first",
        path));
  }
  return read_file(path);
}

ModelRanks start_model_ranks(const ModelArguments& options, const Arguments& arguments) {
  ModelRanks ranks;
  ranks.plan = {.pp = options.pp, .tp = options.tp, .sequence_parallel = false};
  if (read_worker_environment().world_size <= 1) {
    ranks.process.store = std::make_shared<HashStore>();
    ranks.process.device = choose_device(options.device);
  } else {
    if (options.device.starts_with("cuda:")) {
      throw UsageError(
          fmt::format("--device is '{}': each of several ranks takes its own; expected cpu or cuda", options.device));
    }
    ranks.process = init_from_environment({.backend = options.backend,
                                           .device = options.device.empty() ? "auto" : options.device,
                                           .loads_kernels_at_start = options.pp > 1,
                                           .communicator = {.timeout = kPatience}});
    require_same_command(*ranks.process.world, arguments);
    ranks.process.world->mark_started();
  }
  ranks.plan.dp_replicate = ranks.process.world_size / (options.tp * options.pp);
  if (!ranks.process.world) return ranks;
  ranks.mesh.emplace(ranks.process.world, ranks.plan.axes());
  if (ranks.plan.pp > 1) ranks.stages = ranks.mesh->communicator("pp");
  if (ranks.plan.uses_model_parallelism()) {
    const int pp = ranks.plan.pp > 1 ? ranks.mesh->coordinate("pp") : 0;
    const int tp = ranks.plan.tp > 1 ? ranks.mesh->coordinate("tp") : 0;
    ranks.copy = ranks.process.world->split(ranks.member(), pp * static_cast<int>(ranks.plan.tp) + tp, "copy");
  }
  return ranks;
}

infer::ModelFiles find_model(const ModelArguments& options) {
  infer::ModelFiles files = infer::find_model(options.checkpoint);
  files.allow_model_mismatch = options.allow_model_mismatch;
  if (!options.adapter.empty()) infer::take_adapter(files, options.adapter, options.allow_base_mismatch);
  return files;
}

std::shared_ptr<models::Llama> load_model(const infer::ModelFiles& files, const ModelRanks& ranks,
                                          const std::string& dtype) {
  const at::ScalarType type = dtype == "bfloat16" ? at::kBFloat16 : dtype == "float16" ? at::kHalf : at::kFloat;
  if (!ranks.mesh) return infer::load_model(files, ranks.process.device, type);
  // If a folder is given, the newest step may change between the reads of two ranks.
  nlohmann::json mine = {{"model", models::model_identity(files.config)}};
  ranks.each([&] {
    mine["weights"] = weights_identity(files.weights);
    if (!files.adapter.empty()) mine["adapter"] = adapter_identity(files.adapter);
  });
  ranks.require_same("model", mine);
  return infer::load_model_shard(files, ranks.plan, *ranks.mesh, ranks.process.device, type);
}

}  // namespace phalanx::cli
