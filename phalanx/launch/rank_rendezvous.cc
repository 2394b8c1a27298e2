#include "phalanx/launch/rank_rendezvous.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/owner_process.h"
#include "phalanx/base/version.h"
#include "phalanx/comm/hierarchical/node_discovery.h"
#include "phalanx/launch/agent_store.h"
#include "phalanx/launch/libtorch_version.h"
#include "phalanx/launch/rendezvous/own_address.h"
#include "phalanx/launch/rendezvous/rendezvous_file.h"
#include "phalanx/store/job_secret.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using std::chrono::milliseconds;
using Rendezvous = WorkerEnvironment::Rendezvous;

// The CPUs that this process may use. A launcher may have bound it to them.
std::string cpus_of_process() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::string text;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return text;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) text += fmt::format("{},", cpu);
  return text;
}

// The store that this rank can reach, and the server if this rank hosts it.
struct ReachedStore {
  std::shared_ptr<TcpStoreServer> server;
  std::shared_ptr<TcpStore> store;
  JobSecret secret;
  std::string file;  // the rendezvous file that rank 0 wrote; removed when all ranks have joined
};

std::shared_ptr<TcpStoreServer> serve_on(const std::string& host, std::uint16_t port, const std::string& secret) {
  return std::make_shared<TcpStoreServer>(TcpStoreServerOptions{.host = host, .port = port, .secret = secret});
}

std::shared_ptr<TcpStore> join(const HostPort& address, milliseconds timeout, const std::string& secret) {
  return std::make_shared<TcpStore>(address,
                                    TcpStoreOptions{.timeout = timeout, .connect_timeout = timeout, .secret = secret});
}

// Rank 0 hosts the store at the master's address and port, which all ranks know.
std::shared_ptr<TcpStoreServer> serve_at_master(const WorkerEnvironment& environment, const std::string& secret) {
  const HostPort& master = environment.master;
  if (const auto chosen = chosen_address()) return serve_on(*chosen, master.port, secret);
  // On Debian a host's own name resolves to 127.0.1.1 on itself, and to another address on other nodes.
  const bool is_name = master.host.find_first_not_of("0123456789.") != std::string::npos &&
                       master.host.find(':') == std::string::npos && master.host != "localhost";
  const bool loopback = is_loopback(master.host);
  if (loopback && !is_name)
    return serve_on(master.host == "localhost" ? "127.0.0.1" : master.host, master.port, secret);
  if (loopback && environment.on_one_node()) return serve_on("127.0.0.1", master.port, secret);
  if (!loopback) {
    try {
      return serve_on(master.host, master.port, secret);
    } catch (const CommError& error) {
      if (std::string(error.what()).find("not an address of this machine") == std::string::npos) throw;
    }
  }
  log::warn(fmt::format("{} is {}: the store listens on every interface. PHALANX_SOCKET_IFNAME names one", master.host,
                        loopback ? "loopback to this node itself" : "not an address of this node"));
  return serve_on("*", master.port, secret);
}

ReachedStore rendezvous_at_master(const WorkerEnvironment& environment, milliseconds timeout) {
  ReachedStore result;
  result.secret = job_secret_from_environment();
  if (environment.rank == 0) result.server = serve_at_master(environment, result.secret.value);
  try {
    result.store = join(result.server ? result.server->address() : environment.master, timeout, result.secret.value);
  } catch (const CommError& error) {
    throw CommError(
        fmt::format("rank {} did not reach the rendezvous with rank 0, which is to host the store at {}: {}",
                    environment.rank, environment.master.text(), error.what()));
  }
  return result;
}

// Rank 0 chooses the address of the store and writes it into the private file `path`.
ReachedStore rendezvous_by_file(const WorkerEnvironment& environment, const std::string& path, milliseconds timeout) {
  const RendezvousFile file(path);
  ReachedStore result;
  result.secret = job_secret_from_environment();
  const std::string own_secret = result.secret.value;
  if (environment.rank == 0) {
    std::string secret = own_secret.empty() ? generate_job_secret() : own_secret;
    const std::string host = environment.on_one_node() ? "127.0.0.1" : own_address();
    result.server = serve_on(host, 0, secret);
    file.publish({result.server->address(), own_secret.empty() ? secret : ""});
    result.file = path;
    result.store = join(result.server->address(), timeout, secret);
  } else {
    result.store = file.connect(timeout, own_secret);
  }
  if (own_secret.empty()) result.secret.source = "the rendezvous file";
  return result;
}

constexpr std::string_view kFile = "file:";

// Under torchrun: torchrun's store admits everyone, so it only passes on our store's address, never a secret. On one
// node it passes on the name of a private file instead.
ReachedStore serve_through_agent(const WorkerEnvironment& environment, const std::string& key, bool by_file,
                                 milliseconds timeout) {
  ReachedStore result;
  std::string value;
  if (by_file) {
    const std::string path = fmt::format("{}/torchrun-{}", private_temp_folder(), generate_job_secret().substr(0, 16));
    result = rendezvous_by_file(environment, path, timeout);
    value = std::string(kFile) + path;
  } else {
    result.secret = job_secret_from_environment();
    const std::string host = environment.on_one_node() ? "127.0.0.1" : own_address(environment.master);
    result.server = serve_on(host, 0, result.secret.value);
    value = result.server->address().text();
    result.store = join(result.server->address(), timeout, result.secret.value);
  }
  exchange_through_agent_store(environment.master, key, &value, timeout);
  return result;
}

// For the other ranks: `value` is what they read from torchrun's store. They wait at most a second for a store that
// does not exist.
ReachedStore follow_agent(const WorkerEnvironment& environment, const std::string& key, const std::string& value,
                          bool by_file, milliseconds timeout) {
  const milliseconds moment = std::min(timeout, milliseconds(1'000));
  if (by_file) {
    if (!value.starts_with(kFile))
      throw ConfigError(
          fmt::format("key '{}' of torchrun's store at {} is '{}': expected the name of a file of rank 0's; give "
                      "PHALANX_JOB_SECRET to every rank or to none",
                      key, environment.master.text(), value));
    return rendezvous_by_file(environment, value.substr(kFile.size()), moment);
  }
  ReachedStore result;
  result.secret = job_secret_from_environment();
  const HostPort address = parse_host_port(value, fmt::format("key '{}' of torchrun's store", key));
  connect_to(address, moment, "the store");
  result.store =
      std::make_shared<TcpStore>(address, TcpStoreOptions{.timeout = timeout,
                                                          .connect_timeout = std::min(timeout, milliseconds(10'000)),
                                                          .secret = result.secret.value});
  return result;
}

// The agents of a job may count its restarts differently (each counts only those that its own ranks caused). So all
// attempts use the same key. The key may still hold the address of the last attempt. Then nothing listens there, and
// the rank reads the key again until rank 0 has written the new address.
ReachedStore rendezvous_through_agent(const WorkerEnvironment& environment, milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const std::string key = fmt::format("phalanx/{}/store", environment.run_id);
  const bool by_file = job_secret_from_environment().value.empty() && environment.on_one_node();
  if (environment.rank == 0) return serve_through_agent(environment, key, by_file, timeout);
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    const std::string current = exchange_through_agent_store(environment.master, key, nullptr, timeout);
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    try {
      return follow_agent(environment, key, current, by_file, std::max(left, milliseconds(1)));
    } catch (const CommError& error) {
      if (Clock::now() >= deadline)
        throw CommError(fmt::format("rank 0 was not reached within {} s where torchrun's store at {} says, {}: {}",
                                    static_cast<double>(timeout.count()) / 1000.0, environment.master.text(), current,
                                    error.what()));
    }
    std::this_thread::sleep_for(milliseconds(50));
  }
}

ReachedStore reach_store(const WorkerEnvironment& environment, milliseconds timeout) {
  switch (environment.rendezvous) {
    case Rendezvous::agent_store:
      return rendezvous_through_agent(environment, timeout);
    case Rendezvous::static_master:
      return rendezvous_at_master(environment, timeout);
    case Rendezvous::shared_file:
      return rendezvous_by_file(
          environment,
          fmt::format("{}/{}", environment.file_folder.empty() ? private_temp_folder() : environment.file_folder,
                      environment.file_name),
          timeout);
    default: {
      ReachedStore result;
      result.secret = job_secret_from_environment();
      result.store = join(environment.store, timeout, result.secret.value);
      return result;
    }
  }
}

std::string claim_key(int rank) { return fmt::format("claim/{}", rank); }
std::string gone_key(int rank) { return fmt::format("gone/{}", rank); }

// Keeps the store alive as long as a rank that joined may need it.
class StoreHost {
 public:
  StoreHost(ReachedStore reached, std::shared_ptr<Store> keys, int rank, int world_size)
      : reached_(std::move(reached)), keys_(std::move(keys)), presence_(keys_->clone()), world_size_(world_size) {
    presence_->set_when_lost(gone_key(rank), "");
  }
  ~StoreHost() {
    if (!owner_.is_this_process()) return;
    remove_file();
    presence_.reset();  // sends no request, so a store that does not answer cannot block it
    if (!reached_.server) return;
    try {
      std::vector<std::string> awaited;
      for (int rank = 0; rank < world_size_; ++rank)
        if (complete_ || keys_->try_get(claim_key(rank))) awaited.push_back(gone_key(rank));
      keys_->wait(awaited, std::chrono::seconds(5));
    } catch (const Error&) {
      // Ranks that still use the store will notice that it is gone.
    }
  }
  StoreHost(const StoreHost&) = delete;
  StoreHost& operator=(const StoreHost&) = delete;
  void all_came() {
    complete_ = true;
    remove_file();
  }

 private:
  void remove_file() {
    if (!reached_.file.empty()) RendezvousFile(std::exchange(reached_.file, {})).remove();
  }

  OwnerProcess owner_;
  ReachedStore reached_;
  std::shared_ptr<Store> keys_;
  std::shared_ptr<Store> presence_;  // a client that the store loses when this rank leaves or dies
  int world_size_;
  bool complete_ = false;
};

const std::string kNotStarted = "the ranks did not all start: ";

// An error of one rank fails all ranks: the others throw at once instead of waiting for a rank that cannot come.
[[noreturn]] void abort_rendezvous(Store& store, const std::string& reason) {
  store.compare_and_set("trouble", std::nullopt, reason);
  throw CommError(store.get("trouble"));
}

constexpr std::string_view kCpusAfter = " cpus:", kProcessAfter = "\tprocess:";

// Waits for a key that is set when all ranks have reached this point. Throws if one of the ranks fails in the meantime.
void await_all(Store& store, StartupMonitor& startup_monitor, const WorkerEnvironment& environment,
               const std::string& key, milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto look_every = std::max(milliseconds(200), environment.world_size * milliseconds(3));
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    const auto begin = Clock::now();
    const auto slice = std::clamp(std::chrono::ceil<milliseconds>(deadline - begin), milliseconds(1), look_every);
    std::string first;
    try {
      first = store.wait_any({key, "trouble", StartupMonitor::kGone}, slice);
    } catch (const CommError&) {
      if (Clock::now() - begin < slice) throw;  // not a timeout
    }
    if (first == key) return;
    if (first == StartupMonitor::kGone) throw CommError(kNotStarted + store.get(first));
    if (first == "trouble") throw CommError(store.get(first));
    if (const std::string why = startup_monitor.failure_in_rendezvous(); !why.empty())
      abort_rendezvous(store, kNotStarted + why);
    if (Clock::now() < deadline) continue;
    std::string missing;
    for (int rank = 0; rank < environment.world_size; ++rank)
      if (!store.try_get(claim_key(rank))) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
    const std::string within = fmt::format("within {} s", static_cast<double>(timeout.count()) / 1000.0);
    abort_rendezvous(store, missing.empty()
                                ? fmt::format("{}: all {} ranks have come, but rank 0 has not said {} where they are",
                                              store.describe(), environment.world_size, within)
                                : fmt::format("{}: of {} ranks these have not come {}: {}", store.describe(),
                                              environment.world_size, within, missing));
  }
}

/// Compares each rank's value with the value of the first rank that came.
void require_same(Store& store, const WorkerEnvironment& environment, const std::string& key, const std::string& mine,
                  const std::string& what, const std::string& advice) {
  const std::string value = fmt::format("{} {}", environment.rank, mine);
  const std::string first = store.compare_and_set(key, std::nullopt, value).value_or(value);
  const std::size_t space = std::min(first.find(' '), first.size());
  const std::string theirs = first.substr(std::min(space + 1, first.size()));
  if (theirs == mine) return;
  abort_rendezvous(store,
                   fmt::format("the ranks do not have the same {}: {} on rank {}; {} on rank {} ({}): {}", what, theirs,
                               first.substr(0, space), mine, environment.rank, store.describe(), advice));
}

/// Checks that must come before all others. Another version may round differently or encode its messages differently.
/// With another backend each rank would wait for the others forever.
void compare_builds_and_backends(Store& store, const WorkerEnvironment& environment, const std::string& backend) {
  const std::string build = "start every rank with the same build of the program and the same libtorch";
  require_same(store, environment, "version/Phalanx", version(), "version of Phalanx", build);
  require_same(store, environment, "version/libtorch", libtorch_version(), "version of libtorch", build);
  require_same(store, environment, "backend", backend, "backend",
               "give every rank the same ([comm] backend, --backend, InitOptions::backend)");
}

// Every rank publishes its identity and host, and gets those of all ranks. Errors name ranks that join twice or not at
// all.
std::vector<std::string> exchange_rank_info(Store& store, StartupMonitor& startup_monitor,
                                            const WorkerEnvironment& environment,
                                            const RankRendezvousOptions& options) {
  const milliseconds timeout = options.timeout;
  const std::string size = std::to_string(environment.world_size);
  const auto agreed = store.compare_and_set("world_size", std::nullopt, size);
  if (agreed != size)
    abort_rendezvous(store, fmt::format("rank {} was started with a world size of {} and another rank with {} ({})",
                                        environment.rank, size, agreed.value_or("none"), store.describe()));
  compare_builds_and_backends(store, environment, options.backend);
  const std::string host_id = local_host_id();
  // The process id is part of the claim. Without it a second process on the same host would seem to have made the claim
  // itself.
  const std::string claim = fmt::format("{} process {}", host_id, getpid());
  if (store.try_get(claim_key(environment.rank)) != claim) {
    if (store.compare_and_set(claim_key(environment.rank), std::nullopt, claim) != claim)
      abort_rendezvous(store, fmt::format("rank {} was started twice: another process has it already ({})",
                                          environment.rank, store.describe()));
    store.set(
        fmt::format("place/{}", environment.rank),
        fmt::format("{}{}{}{}{}", host_id, kCpusAfter, cpus_of_process(), kProcessAfter, ProcessProbe::identity()));
    if (store.add("arrived", 1) == environment.world_size) store.set("complete", "");
  }
  // Rank 0 joins the entries of all ranks. If each rank read each entry, the cost would be quadratic in the number of
  // ranks.
  if (environment.rank == 0) {
    await_all(store, startup_monitor, environment, "complete", timeout);
    std::vector<std::string> keys;
    for (int rank = 0; rank < environment.world_size; ++rank) keys.push_back(fmt::format("place/{}", rank));
    std::string joined;
    for (const auto& value : store.get_all(keys, timeout)) joined += value + "\n";
    store.set("places", joined);
  }
  await_all(store, startup_monitor, environment, "places", timeout);
  const std::string joined = store.get("places", timeout);
  std::vector<std::string> host_ids;
  for (std::size_t begin = 0, end; (end = joined.find('\n', begin)) != std::string::npos; begin = end + 1)
    host_ids.push_back(joined.substr(begin, end - begin));
  return host_ids;
}

}  // namespace

RankRendezvous rendezvous_ranks(const WorkerEnvironment& environment, const RankRendezvousOptions& options) {
  ReachedStore reached = reach_store(environment, options.timeout);
  RankRendezvous result;
  result.store = reached.store;
  result.server = environment.rendezvous == Rendezvous::static_master ? environment.master : reached.store->server();
  result.secret_source = reached.secret.source;
  if (reached.server && reached.secret.source.empty() && !is_loopback(reached.server->address().host))
    log::warn(
        fmt::format("the store at {} lets in whoever reaches it: set PHALANX_JOB_SECRET, or "
                    "PHALANX_JOB_SECRET_FILE, to the same on every node",
                    result.server.text()));
  auto keys = std::make_shared<PrefixStore>(result.store, "init");
  auto host = std::make_shared<StoreHost>(std::move(reached), keys, environment.rank, environment.world_size);
  result.host = host;
  result.startup_monitor = std::make_shared<StartupMonitor>(
      keys, StartupMonitor::Options{.rank = environment.rank,
                                    .world_size = environment.world_size,
                                    .store_rank = environment.rendezvous == Rendezvous::launcher ? -1 : 0,
                                    .host_id = local_host_id(),
                                    .heartbeat = options.heartbeat});
  result.host_ids = exchange_rank_info(*keys, *result.startup_monitor, environment, options);
  std::vector<std::string> identities;
  for (auto& host_id : result.host_ids) {
    const std::size_t at = host_id.rfind(kProcessAfter);
    identities.push_back(host_id.substr(at + kProcessAfter.size()));
    host_id.erase(at);
  }
  result.startup_monitor->all_came(result.store, identities);
  const std::string& own = result.host_ids[static_cast<std::size_t>(environment.rank)];
  result.ranks_on_these_cpus = static_cast<int>(std::count(result.host_ids.begin(), result.host_ids.end(), own));
  for (auto& host_id : result.host_ids) host_id.erase(host_id.rfind(kCpusAfter));
  host->all_came();
  return result;
}

}  // namespace phalanx
