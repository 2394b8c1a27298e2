#include "phalanx/launch/process_context.h"

#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "phalanx/base/cpu.h"
#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/nearest.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/local_backend.h"
#include "phalanx/comm/backends/local_shm/shared_tensors.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/backends/mpi/mpi.h"
#include "phalanx/comm/backends/nccl/device_communicator.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/launch/rank_rendezvous.h"
#include "phalanx/launch/rendezvous/init_method.h"
#include "phalanx/launch/rendezvous/own_address.h"
#include "phalanx/launch/rendezvous/security_line.h"
#include "phalanx/launch/supervisor/trace_folders.h"
#include "phalanx/store/hash_store.h"
#include "phalanx/store/job_secret.h"

namespace phalanx {
namespace {

using Rendezvous = WorkerEnvironment::Rendezvous;

c10::Device choose_device(const InitOptions& options, int local_rank) {
  if (options.device != "auto" && options.device != "cpu" && options.device != "cuda")
    throw ConfigError(fmt::format("device '{}'{}: expected auto, cpu or cuda", options.device,
                                  did_you_mean(options.device, {"auto", "cpu", "cuda"})));
  if (options.device == "cpu") return c10::Device(c10::DeviceType::CPU);
  const auto& hooks = at::detail::getCUDAHooks();
  const int gpus = hooks.hasCUDA() ? hooks.getNumGPUs() : 0;
  if (gpus == 0 && options.device == "auto") return c10::Device(c10::DeviceType::CPU);
  if (gpus == 0) throw ConfigError("device cuda: this libtorch has no CUDA, or this node no GPU");
  // Slurm and others may show each rank only its own GPU.
  if (gpus == 1 && local_rank > 0 && env_string("CUDA_VISIBLE_DEVICES")) return {c10::DeviceType::CUDA, 0};
  if (local_rank >= gpus)
    throw ConfigError(
        fmt::format("the local rank is {} and this node has {} GPU{}: start as many ranks as there are "
                    "GPUs, or choose the device cpu",
                    local_rank, gpus, gpus == 1 ? "" : "s"));
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(local_rank)};
}

void check_backend_name(const InitOptions& options, int world_size) {
  const std::vector<std::string> known{"auto",    "shm",  "gloo",      "mpi",      "shm+gloo",
                                       "shm+mpi", "nccl", "nccl+gloo", "nccl+mpi", "local"};
  if (std::find(known.begin(), known.end(), options.backend) == known.end())
    throw ConfigError(
        fmt::format("backend '{}'{}: expected auto, shm, gloo, mpi, shm+gloo, shm+mpi, nccl, nccl+gloo, nccl+mpi "
                    "or local",
                    options.backend, did_you_mean(options.backend, known)));
  if (options.backend == "local" && world_size > 1)
    throw ConfigError(
        fmt::format("backend local joins threads of one process, and there are {} processes: choose auto, "
                    "shm or gloo",
                    world_size));
}

std::string describe_start(const ProcessContext& context, const std::string& how) {
  const int threads = at::get_num_threads();
  return fmt::format("device: {}, backend: {}, {}, {} thread{} a rank{}", context.device.str(),
                     context.world->backend_name(), how, threads, threads == 1 ? "" : "s",
                     SharedHeap::current() ? ", large tensors in shared heaps" : "");
}

// The address on which this rank receives the data of other ranks.
std::string data_address(const HostPort& server, bool single_node) {
  if (const auto chosen = chosen_address()) return *chosen;
  constexpr const char* kTorchs = "GLOO_SOCKET_IFNAME";  // may list several interfaces; gloo uses them in turn
  if (const auto names = env_string(kTorchs)) return address_of_interface(names->substr(0, names->find(',')), kTorchs);
  return single_node ? "127.0.0.1" : own_address(server);
}

// CUDA tensors go through NCCL. If another backend is requested, they go through that backend and host memory.
void put_on_device(ProcessContext& context, const std::string& asked, const CommunicatorOptions& options) {
  if (asked.starts_with("nccl") && !context.device.is_cuda())
    throw ConfigError(fmt::format(
        "backend {} moves CUDA tensors, and the device is cpu: choose the device cuda or the backend auto", asked));
  if (asked.starts_with("nccl+")) {
    context.world = make_nccl_hierarchical_communicator(std::move(context.world), context.device.index(),
                                                        {.communicator = options});
    return;
  }
  const DevicePath path = asked == "nccl"   ? DevicePath::nccl
                          : asked == "auto" ? DevicePath::automatic
                                            : DevicePath::staged;
  context.world =
      make_device_communicator(std::move(context.world), context.device, {.path = path, .communicator = options});
}

// The flight recorder always has a folder: the launcher's, otherwise one that the ranks agree on. `agree` returns on
// all ranks the name from the first rank that calls it.
template <class Agree>
void choose_trace_folder(CommunicatorOptions& options, const WorkerEnvironment& environment, Agree agree) {
  if (!options.trace_files || !options.trace_folder.empty() || env_string("PHALANX_COMM_TRACE_DIR")) return;
  if (environment.rendezvous == Rendezvous::launcher)
    options.trace_folder = env_string(kTraceFolderVariable).value_or("");
  if (options.trace_folder.empty())
    options.trace_folder = temporary_trace_folder(agree(generate_job_secret().substr(0, 16)));
}

// If this fails, everything works the same, except that copies take time.
void start_shared_heap() {
  try {
    share_large_tensors();
  } catch (const CommError& error) {
    log::warn_once(fmt::format("large tensors are copied between the ranks of a node: {}", error.what()));
  }
}

bool is_single_node(const RankRendezvous& rank_rendezvous) {
  return std::equal(rank_rendezvous.host_ids.begin() + 1, rank_rendezvous.host_ids.end(),
                    rank_rendezvous.host_ids.begin());
}

// Creates the world communicator after the rendezvous. Returns the name of the host backend.
std::string make_world(ProcessContext& context, const RankRendezvous& rank_rendezvous,
                       const WorkerEnvironment& environment, InitOptions options, const std::string& asked) {
  auto rendezvous = std::make_shared<PrefixStore>(rank_rendezvous.store, "init");
  choose_trace_folder(options.communicator, environment, [&](const std::string& own) {
    return rendezvous->compare_and_set("trace_folder", std::nullopt, own).value_or(own);
  });
  // Under srun and mpirun each rank starts with a thread for every core, although it shares the cores with other ranks.
  if (const int share = std::max(1, usable_cores() / rank_rendezvous.ranks_on_these_cpus);
      !threads_from_environment() && at::get_num_threads() > share)
    at::set_num_threads(share);
  const auto& host_ids = rank_rendezvous.host_ids;
  const bool single_node = is_single_node(rank_rendezvous);
  context.local_rank = environment.local_rank;
  context.local_world_size = environment.local_world_size;
  if (context.local_rank < 0) {
    // The launcher gave no local rank: count the ranks of this node.
    const auto& own = host_ids[static_cast<std::size_t>(context.rank)];
    context.local_rank = static_cast<int>(std::count(host_ids.begin(), host_ids.begin() + context.rank, own));
    context.local_world_size = static_cast<int>(std::count(host_ids.begin(), host_ids.end(), own));
  }
  context.device = choose_device(options, context.local_rank);
  if (options.backend == "shm" && !single_node)
    throw ConfigError(
        "backend shm: the ranks do not share one node (kernel, network and process namespace): "
        "choose gloo or auto");
  if (options.backend == "shm" || (options.backend == "auto" && single_node)) {
    try {
      context.world = make_shm_communicator(*rendezvous, context.rank, context.world_size, options.communicator);
    } catch (const CommError& error) {
      if (options.backend == "shm" || !rank_rendezvous.startup_monitor->failure_reason().empty()) throw;
      // The ranks have agreed on the failure and on its reason.
      log::warn_once(fmt::format("shared memory cannot be used, so gloo is: {}", error.what()));
    }
  }
  const int store_rank = environment.rendezvous == Rendezvous::launcher ? -1 : 0;
  if (options.backend == "mpi")
    context.world = make_mpi_communicator(rendezvous, context.rank, context.world_size,
                                          {.store_rank = store_rank, .communicator = options.communicator});
  if (!context.world)
    context.world = make_gloo_communicator(rendezvous, context.rank, context.world_size,
                                           {.host = data_address(rank_rendezvous.server, single_node),
                                            .store_rank = store_rank,
                                            .communicator = options.communicator});
  // Use two levels if they are requested, or if some ranks seem to share a node. The proof in node_discovery.h decides
  // which ranks do.
  const std::set<std::string> different(host_ids.begin(), host_ids.end());
  if (asked.starts_with("shm+") ||
      (options.backend == "auto" && context.world->backend_name() == "gloo" && different.size() < host_ids.size()))
    context.world = make_hierarchical_communicator(std::move(context.world), {.communicator = options.communicator});
  std::string host_backend = context.world->backend_name();
  put_on_device(context, asked, options.communicator);
  return host_backend;
}

}  // namespace

ProcessContext init_from_environment(InitOptions options) {
  threads_from_environment();  // a wrong value throws before the other ranks wait for this rank
  const WorkerEnvironment environment = resolve_init_method(options.method, options.rank, options.world_size);
  check_backend_name(options, environment.world_size);
  if (options.loads_kernels_at_start) ::setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/1);
  // The host side of a world for CUDA tensors uses the backend that "auto" would use.
  const std::string asked = options.backend;
  if (asked == "nccl") options.backend = "auto";
  if (asked.find('+') != std::string::npos) options.backend = asked.substr(asked.find('+') + 1);  // inter-node
  log::set_process_rank(environment.rank, environment.world_size);
  ProcessContext context;
  context.rank = environment.rank;
  context.world_size = environment.world_size;

  if (environment.rendezvous == Rendezvous::none) {
    context.store = std::make_shared<HashStore>();
    context.device = choose_device(options, std::max(environment.local_rank, 0));
    choose_trace_folder(options.communicator, environment, [](const std::string& own) { return own; });
    if (options.backend == "auto" || options.backend == "local")
      context.world = std::make_shared<Communicator>(make_local_backends(1).front(), options.communicator);
    else if (options.backend == "shm")
      context.world = make_shm_communicator(*context.store, 0, 1, options.communicator);
    else if (options.backend == "mpi")
      context.world = make_mpi_communicator(context.store, 0, 1, {.communicator = options.communicator});
    else
      context.world = make_gloo_communicator(context.store, 0, 1, {.communicator = options.communicator});
    put_on_device(context, asked, options.communicator);
    log::info(describe_start(context, "a single process"));
    return context;
  }

  if (options.shared_heap ? *options.shared_heap : env_bool("PHALANX_SHARED_HEAP").value_or(false)) start_shared_heap();
  log::info(fmt::format("rank {} of {}, from {}", context.rank, context.world_size, environment.launcher));
  const RankRendezvous rank_rendezvous =
      rendezvous_ranks(environment, {.timeout = options.communicator.first_timeout,
                                     .heartbeat = heartbeat_limit(options.communicator.heartbeat),
                                     .backend = asked});
  context.host = rank_rendezvous.host;
  context.store = rank_rendezvous.store;
  std::string host_backend;
  try {
    host_backend = make_world(context, rank_rendezvous, environment, options, asked);
  } catch (const CommError&) {
    const std::string why = rank_rendezvous.startup_monitor->failure_reason();
    if (why.empty()) throw;
    throw CommError(fmt::format("the ranks did not all start: {}", why));
  }
  rank_rendezvous.startup_monitor->started();
  const bool single_node = is_single_node(rank_rendezvous);
  log::info(security_line({.store = rank_rendezvous.server,
                           .secret_source = rank_rendezvous.secret_source,
                           .backend = context.world->backend_name(),
                           .host_backend = host_backend}));
  log::info(describe_start(context, fmt::format("{} ranks{}, rendezvous at {}", context.world_size,
                                                single_node ? " on this node" : "", rank_rendezvous.server.text())));
  return context;
}

}  // namespace phalanx
