#include "phalanx/launch/process_context.h"

#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/nearest.h"
#include "phalanx/comm/gloo.h"
#include "phalanx/comm/job_secret.h"
#include "phalanx/comm/local_backend.h"
#include "phalanx/comm/local_store.h"
#include "phalanx/comm/shm.h"
#include "phalanx/comm/tcp_store.h"
#include "phalanx/launch/agent_store.h"
#include "phalanx/launch/worker_environment.h"

namespace phalanx {
namespace {

using Rendezvous = WorkerEnvironment::Rendezvous;

// Two processes with equal places may share memory: the same kernel, network and process numbers.
std::string place_of_process() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  std::string place = boot_id;
  for (const char* name : {"net", "pid"}) {
    struct stat status {};
    const bool known = stat(fmt::format("/proc/self/ns/{}", name).c_str(), &status) == 0;
    place += fmt::format(" {}:{}", name, known ? std::to_string(status.st_ino) : "?");
  }
  return place;
}

WorkerEnvironment environment_of(const InitOptions& options) {
  if (options.method == "env://") return read_worker_environment();
  if (!options.method.starts_with("tcp://"))
    throw ConfigError(fmt::format("init method '{}': expected env:// or tcp://HOST:PORT", options.method));
  WorkerEnvironment environment;
  environment.rendezvous = Rendezvous::static_master;
  environment.master = parse_host_port(options.method.substr(6), "the init method");
  environment.rank = environment.local_rank = options.rank;
  environment.world_size = environment.local_world_size = options.world_size;
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
    throw ConfigError(
        fmt::format("init method '{}' with rank {} and world size {}: expected a rank from 0 to the world "
                    "size less one",
                    options.method, options.rank, options.world_size));
  if (options.world_size == 1) environment.rendezvous = Rendezvous::none;
  return environment;
}

// Our server on rank 0, at the given port, where the others reach it by the master's name.
std::shared_ptr<TcpStoreServer> host_store(const HostPort& master, std::uint16_t port) {
  if (is_loopback(master.host)) return std::make_shared<TcpStoreServer>(TcpStoreServerOptions{.port = port});
  try {
    return std::make_shared<TcpStoreServer>(TcpStoreServerOptions{.host = master.host, .port = port});
  } catch (const CommError& error) {
    if (std::string(error.what()).find("not an address of this machine") == std::string::npos) throw;
    log::warn(fmt::format("{} is not an address of this machine: the store listens on every interface", master.host));
    return std::make_shared<TcpStoreServer>(TcpStoreServerOptions{.host = "*", .port = port});
  }
}

struct Meeting {
  std::shared_ptr<TcpStoreServer> server;  // on the rank that hosts the store
  std::shared_ptr<TcpStore> store;
};

Meeting meet(const WorkerEnvironment& environment, std::chrono::milliseconds timeout) {
  TcpStoreOptions client{.timeout = timeout, .connect_timeout = timeout};
  if (environment.rendezvous == Rendezvous::launcher) client.secret = job_secret_from_environment().value;
  Meeting result;
  HostPort address = environment.store;
  const bool hosts = environment.rank == 0;
  if (environment.rendezvous == Rendezvous::static_master) {
    address = environment.master;
    if (hosts) result.server = host_store(address, address.port);
  } else if (environment.rendezvous == Rendezvous::agent_store) {
    // A restart is a new meeting: its store is not the last one's.
    const std::string key = fmt::format("phalanx/{}/{}/store", environment.run_id, environment.restart_count);
    std::string text;
    if (hosts) {
      result.server = host_store(environment.master, 0);
      text = HostPort{environment.master.host, result.server->address().port}.text();
    }
    text = exchange_through_agent_store(environment.master, key, hosts ? &text : nullptr, timeout);
    address = parse_host_port(text, fmt::format("key '{}' of torchrun's store", key));
  }
  result.store = std::make_shared<TcpStore>(address, client);
  return result;
}

// Every rank says who and where it is; all learn where all are. Ranks that come twice or not at all are named.
std::vector<std::string> roll_call(Store& store, const WorkerEnvironment& environment,
                                   std::chrono::milliseconds timeout) {
  const std::string size = std::to_string(environment.world_size);
  const auto agreed = store.compare_and_set("world_size", std::nullopt, size);
  if (agreed != size)
    throw CommError(fmt::format("rank {} was started with a world size of {} and another rank with {} ({})",
                                environment.rank, size, agreed.value_or("none"), store.describe()));
  // The same place twice would look like success, so the process is part of the claim.
  const std::string claim = fmt::format("{} process {}", place_of_process(), getpid());
  const auto held = store.compare_and_set(fmt::format("claim/{}", environment.rank), std::nullopt, claim);
  if (held != claim)
    throw CommError(fmt::format("rank {} was started twice: another process has it already ({})", environment.rank,
                                store.describe()));
  store.set(fmt::format("place/{}", environment.rank), place_of_process());
  std::vector<std::string> keys;
  for (int rank = 0; rank < environment.world_size; ++rank) keys.push_back(fmt::format("place/{}", rank));
  try {
    return store.get_all(keys, timeout);
  } catch (const CommError& error) {
    std::string missing;
    for (int rank = 0; rank < environment.world_size; ++rank)
      if (!store.try_get(keys[static_cast<std::size_t>(rank)]))
        missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
    if (missing.empty()) throw;
    throw CommError(fmt::format("{}: of {} ranks these have not come within {} s: {}", store.describe(),
                                environment.world_size, timeout.count() / 1000.0, missing));
  }
}

c10::Device choose_device(const InitOptions& options, int local_rank) {
  if (options.device != "auto" && options.device != "cpu" && options.device != "cuda")
    throw ConfigError(fmt::format("device '{}'{}: expected auto, cpu or cuda", options.device,
                                  did_you_mean(options.device, {"auto", "cpu", "cuda"})));
  if (options.device == "cpu") return c10::Device(c10::DeviceType::CPU);
  const auto& hooks = at::detail::getCUDAHooks();
  const int gpus = hooks.hasCUDA() ? hooks.getNumGPUs() : 0;
  if (gpus == 0 && options.device == "auto") return c10::Device(c10::DeviceType::CPU);
  if (gpus == 0) throw ConfigError("device cuda: this libtorch has no CUDA, or this machine no GPU");
  if (local_rank >= gpus)
    throw ConfigError(
        fmt::format("LOCAL_RANK is {} and this machine has {} GPU{}: start as many ranks as there are "
                    "GPUs, or choose the device cpu",
                    local_rank, gpus, gpus == 1 ? "" : "s"));
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(local_rank)};
}

// What the context holds on to so that the store is there as long as any rank needs it.
class StoreHost {
 public:
  StoreHost(Meeting meeting, int rank, int world_size)
      : meeting_(std::move(meeting)), rank_(rank), world_size_(world_size) {
    meeting_.store->set_when_lost(key_of(rank_), "");
  }
  ~StoreHost() {
    try {
      meeting_.store->set(key_of(rank_), "");
      if (!meeting_.server) return;
      std::vector<std::string> keys;
      for (int rank = 0; rank < world_size_; ++rank) keys.push_back(key_of(rank));
      meeting_.store->wait(keys, std::chrono::seconds(5));
    } catch (const Error&) {
      // Whoever is still there will notice that the store has gone.
    }
  }
  StoreHost(const StoreHost&) = delete;
  StoreHost& operator=(const StoreHost&) = delete;

 private:
  static std::string key_of(int rank) { return fmt::format("gone/{}", rank); }
  Meeting meeting_;
  int rank_, world_size_;
};

void check_backend_name(const InitOptions& options, int world_size) {
  const std::vector<std::string> known{"auto", "shm", "gloo", "local"};
  if (std::find(known.begin(), known.end(), options.backend) == known.end())
    throw ConfigError(fmt::format("backend '{}'{}: expected auto, shm, gloo or local", options.backend,
                                  did_you_mean(options.backend, known)));
  if (options.backend == "local" && world_size > 1)
    throw ConfigError(
        fmt::format("backend local joins threads of one process, and there are {} processes: choose auto, "
                    "shm or gloo",
                    world_size));
}

}  // namespace

ProcessContext init_from_environment(InitOptions options) {
  WorkerEnvironment environment = environment_of(options);
  check_backend_name(options, environment.world_size);
  log::set_process_rank(environment.rank, environment.world_size);
  ProcessContext context;
  context.rank = environment.rank;
  context.world_size = environment.world_size;
  context.local_rank = environment.local_rank;
  context.local_world_size = environment.local_world_size;

  std::string how = "a single process";
  if (environment.rendezvous == Rendezvous::none) {
    context.store = std::make_shared<LocalStore>();
    context.device = choose_device(options, context.local_rank);
    if (options.backend == "auto" || options.backend == "local")
      context.world = std::make_shared<Communicator>(make_local_backends(1).front(), options.communicator);
    else if (options.backend == "shm")
      context.world = make_shm_communicator(*context.store, 0, 1, options.communicator);
    else
      context.world = make_gloo_communicator(context.store, 0, 1, {.communicator = options.communicator});
  } else {
    const auto timeout = options.communicator.first_timeout;
    Meeting meeting = meet(environment, timeout);
    const HostPort server = meeting.store->server();
    auto rendezvous = std::make_shared<PrefixStore>(meeting.store, "init");
    context.host = std::make_shared<StoreHost>(meeting, environment.rank, environment.world_size);
    context.store = meeting.store;
    const auto places = roll_call(*rendezvous, environment, timeout);
    const bool one_machine = std::equal(places.begin() + 1, places.end(), places.begin());
    if (options.method != "env://") {
      // Nobody has told which rank this is on its machine: count.
      const auto& own = places[static_cast<std::size_t>(context.rank)];
      context.local_rank = static_cast<int>(std::count(places.begin(), places.begin() + context.rank, own));
      context.local_world_size = static_cast<int>(std::count(places.begin(), places.end(), own));
    }
    context.device = choose_device(options, context.local_rank);
    if (options.backend == "shm" && !one_machine)
      throw ConfigError(
          "backend shm: the ranks do not share one machine (kernel, network and process namespace): "
          "choose gloo or auto");
    if (options.backend == "shm" || (options.backend == "auto" && one_machine)) {
      try {
        context.world = make_shm_communicator(*rendezvous, context.rank, context.world_size, options.communicator);
      } catch (const CommError& error) {
        if (options.backend == "shm") throw;
        log::warn(fmt::format("shared memory cannot be used, so gloo is: {}", error.what()));
      }
    }
    if (!context.world) {
      const std::string host = is_loopback(server.host) ? "127.0.0.1" : address_towards(server);
      context.world = make_gloo_communicator(rendezvous, context.rank, context.world_size,
                                             {.host = host, .communicator = options.communicator});
    }
    how =
        fmt::format("{} ranks{}, met at {}", context.world_size, one_machine ? " on this machine" : "", server.text());
  }
  log::info(fmt::format("device: {}, backend: {}, {}, {} thread{} a rank", context.device.str(),
                        context.world->backend_name(), how, at::get_num_threads(),
                        at::get_num_threads() == 1 ? "" : "s"));
  return context;
}

}  // namespace phalanx
