#include "cli/front/launch_arguments.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "cli/parse_options.h"
#include "phalanx/base/cpu.h"
#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/nearest.h"
#include "phalanx/base/parse_text.h"
#include "phalanx/base/signals.h"
#include "phalanx/launch/supervisor/visible_gpus.h"
#include "phalanx/store/job_secret.h"

namespace phalanx::cli {

const std::string_view kLaunchHelp = R"(Usage: phalanx launch [options] [--] PROGRAM [ARGUMENTS...]

Runs PROGRAM as several ranks, on one node or many, with torchrun's flags and environment variables. If a rank fails
all are ended and the root cause is shown; Ctrl-C ends all of them.

Ranks
  -n, --nproc-per-node N|auto|gpu|cpu   ranks on this node: a number, one per GPU, one per core; auto: gpu where there
                                        is one, else cpu. Default 1
      --max-restarts N                  after a failure all ranks start again, so many times. Default 0
      --role NAME                       ROLE_NAME of this node's ranks. Default default
      --numa-binding MODE               node, socket, exclusive or core-complex: the CPUs near each rank's GPU
      --cpu-binding LIST:LIST:...       the CPUs of each local rank, such as 0-3:4-7
      --virtual-local-rank              each rank sees one GPU, as number 0, and LOCAL_RANK 0
Nodes (run the same command on each)
      --nnodes N|MIN:MAX                how many nodes. Default 1
      --rdzv-backend static|c10d        static: every node has a --node-rank; c10d: nodes come and go. Default static
      --rdzv-endpoint HOST[:PORT]       of the rendezvous; the node that has this address hosts it
      --node-rank N                     of this node (static); 0 hosts the rendezvous. Default 0
      --master-addr, --master-port      the endpoint of the static backend, in two parts. Port 29500
      --rdzv-id ID                      the job's name, alike on all nodes
      --rdzv-conf KEY=VALUE,...         join_timeout, last_call_timeout, close_timeout, read_timeout, is_host, bind, ...
      --local-addr ADDRESS              by which the other nodes reach this one
      --standalone                      one node, on its own
Output
      --log-dir DIR                     DIR/<id>_<random>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}
  -r, --redirects 0..3|RANK:V,...       into the files only: 1 standard output, 2 standard error, 3 both
  -t, --tee 0..3|RANK:V,...             into the files and to the console
      --local-ranks-filter R,R,...      only these local ranks on the console
      --duplicate-stdout-filters TEXT,..., --duplicate-stderr-filters TEXT,...
                                        teed lines with one of the texts go into filtered_stdout.log or
                                        filtered_stderr.log, too
Ending
      --signals-to-handle SIG,...       passed on to the ranks, which then end. Default SIGTERM,SIGINT,SIGHUP,SIGUSR1,
                                        SIGUSR2,SIGXCPU
      --shutdown-timeout S              seconds between that signal and SIGKILL
      --no-python, --monitor-interval S, --start-method M, --event-log-handler null
                                        accepted: PROGRAM is any program, started by exec, watched without polling
  -h, --help                            this text

The lines of ranks other than 0 are prefixed with [rank]. Flags may be given as PET_<NAME> in the environment. See
docs/launch_options.md.

  phalanx launch --nproc-per-node 2 ./my_program --its options
  phalanx launch --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node1:29400 ./my_program
)";

namespace {

constexpr int kStaticPort = 29'500;  // torchrun's
constexpr int kDynamicPort = 29'400;

// The options with a value, and the flags. PET_<NAME> in the environment stands for --name.
constexpr const char* kValues[] = {"-n,--nproc-per-node",
                                   "-r,--redirects",
                                   "-t,--tee",
                                   "--nnodes",
                                   "--rdzv-backend",
                                   "--rdzv-endpoint",
                                   "--rdzv-id",
                                   "--rdzv-conf",
                                   "--max-restarts",
                                   "--monitor-interval",
                                   "--role",
                                   "--start-method",
                                   "--event-log-handler",
                                   "--log-dir",
                                   "--local-ranks-filter",
                                   "--duplicate-stdout-filters",
                                   "--duplicate-stderr-filters",
                                   "--node-rank",
                                   "--master-addr",
                                   "--master-port",
                                   "--local-addr",
                                   "--numa-binding",
                                   "--cpu-binding",
                                   "--signals-to-handle",
                                   "--shutdown-timeout"};
constexpr const char* kFlags[] = {"--standalone", "--no-python", "--virtual-local-rank"};

// torchrun's options that are not supported here, in both spellings, with the reason.
constexpr std::pair<const char*, const char*> kRefused[] = {
    {"--module", "the program is any program: write `python -m NAME`"},
    {"-m", "the program is any program: write `python -m NAME`"},
    {"--run-path", "the program is any program: write `python PATH`"},
    {"--run_path", "the program is any program: write `python PATH`"},
    {"--logs-specs", "its log classes are Python; --log-dir, --redirects and --tee say where output goes"},
    {"--logs_specs", "its log classes are Python; --log-dir, --redirects and --tee say where output goes"}};

std::optional<int> number_of(std::string_view text, int min, int max) {
  const auto number = parse_whole<int>(text);
  return number && *number >= min && *number <= max ? number : std::nullopt;
}

std::optional<double> positive_number_of(const std::string& text, bool zero_too) {
  const auto number = parse_whole<double>(text);
  return number && (*number > 0 || (zero_too && *number == 0)) && *number <= 1e9 ? number : std::nullopt;
}

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

// The options that are given, on the command line or else in the environment, and how each was written, for errors.
class GivenOptions {
 public:
  struct Given {
    std::string written, value;
  };

  GivenOptions(const CLI::App& app, const EnvironmentMap& environment) {
    for (const CLI::Option* option : app.get_options()) {
      const std::string name = option->get_name();
      const auto variable = environment.find(variable_of(name));
      if (option->count() > 0) {
        given_[name] = {name, option->results().back()};
      } else if (variable != environment.end() && !variable->second.empty()) {
        given_[name] = {variable->first, variable->second};
      }
    }
    for (const auto& [name, reason] : kRefused) refuse(name, reason);
    for (const char* flag : kFlags) has(flag);  // throws for a variable that is neither 0 nor 1
  }

  const Given* find(const std::string& option) const {
    const auto found = given_.find(option);
    return found == given_.end() ? nullptr : &found->second;
  }
  /// Whether a flag is set.
  bool has(const std::string& flag) const {
    const Given* given = find(flag);
    if (given == nullptr || given->value == "0") return false;
    if (given->value == "1" || given->written == flag) return true;
    throw UsageError(fmt::format("{} is '{}': expected 0 or 1", given->written, given->value));
  }
  std::string text(const std::string& option, const std::string& otherwise = "") const {
    const Given* given = find(option);
    return given != nullptr ? given->value : otherwise;
  }
  int integer(const std::string& option, int min, int max, int otherwise) const {
    const Given* given = find(option);
    if (given == nullptr) return otherwise;
    const auto number = number_of(given->value, min, max);
    if (!number)
      throw UsageError(
          fmt::format("{} is '{}': expected a whole number from {} to {}", given->written, given->value, min, max));
    return *number;
  }

 private:
  static std::string variable_of(const std::string& option) {
    std::string name = "PET_" + option.substr(option.find_first_not_of('-'));
    for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    return name;
  }

  void refuse(const std::string& option, const std::string& reason) const {
    const Given* given = find(option);
    if (given == nullptr) return;
    const bool is_variable = given->written != option;
    if (is_variable && given->value == "0") return;
    throw UsageError(fmt::format("{} is {} of torchrun that phalanx launch does not take: {}",
                                 is_variable ? fmt::format("{} ('{}')", given->written, given->value) : option,
                                 is_variable ? "a variable" : "an option", reason));
  }

  std::map<std::string, Given> given_;
};

void read_node_count(const GivenOptions& flags, NodesOptions& nodes) {
  const auto* given = flags.find("--nnodes");
  if (given == nullptr) return;
  const std::size_t colon = given->value.find(':');
  const auto min = number_of(given->value.substr(0, colon), 1, 100'000);
  const auto max = colon == std::string::npos ? min : number_of(given->value.substr(colon + 1), 1, 100'000);
  if (!min || !max || *min > *max)
    throw UsageError(fmt::format("{} is '{}': expected a number of nodes, or MIN:MAX", given->written, given->value));
  nodes.min_nodes = *min;
  nodes.max_nodes = *max;
}

HostPort read_endpoint(const std::string& written, const std::string& text, int default_port) {
  const bool has_port =
      text.find(':') != std::string::npos && (text.front() != '[' || text.find("]:") != std::string::npos);
  HostPort endpoint = parse_host_port(has_port ? text : fmt::format("{}:{}", text, default_port), written);
  if (endpoint.port == 0)
    throw UsageError(fmt::format("{} is '{}': the rendezvous needs a port that all nodes know", written, text));
  return endpoint;
}

void read_rendezvous_configuration(const GivenOptions& flags, NodesOptions& nodes) {
  const auto* given = flags.find("--rdzv-conf");
  if (given == nullptr || given->value.empty()) return;
  const std::map<std::string, std::chrono::milliseconds*> times{
      {"join_timeout", &nodes.join_timeout},   {"timeout", &nodes.join_timeout},
      {"last_call_timeout", &nodes.last_call}, {"close_timeout", &nodes.close_timeout},
      {"read_timeout", &nodes.read_timeout},   {"keep_alive_interval", &nodes.keep_alive}};
  for (const std::string& item : split_list(given->value)) {
    const std::size_t equals = item.find('=');
    const std::string key = item.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : item.substr(equals + 1);
    const auto wrong = [&](const char* expected) {
      return UsageError(fmt::format("{}: {} is '{}': expected {}", given->written, key, value, expected));
    };
    if (equals == std::string::npos) throw UsageError(fmt::format("{}: '{}' is not key=value", given->written, item));
    if (const auto time = times.find(key); time != times.end()) {
      const auto seconds = positive_number_of(value, key == "last_call_timeout");
      if (!seconds) throw wrong("seconds");
      *time->second = milliseconds_of(*seconds);
    } else if (key == "keep_alive_max_attempt") {
      const auto count = number_of(value, 1, 1000);
      if (!count) throw wrong("a number from 1 to 1000");
      nodes.missed_keep_alives = *count;
    } else if (key == "is_host") {
      const bool yes =
          value == "1" || value == "true" || value == "True" || value == "yes" || value == "t" || value == "y";
      const bool no =
          value == "0" || value == "false" || value == "False" || value == "no" || value == "f" || value == "n";
      if (!yes && !no) throw wrong("true or false");
      nodes.is_host = yes;
    } else if (key == "bind") {
      nodes.bind_address = value;
    } else if (key == "store_type") {
      if (value != "tcp") throw wrong("tcp, the only store of the launcher");
    } else {
      throw UsageError(
          fmt::format("{}: unknown key '{}'{}", given->written, key,
                      did_you_mean(key, {"join_timeout", "last_call_timeout", "close_timeout", "read_timeout",
                                         "keep_alive_interval", "keep_alive_max_attempt", "is_host", "bind"})));
    }
  }
}

void read_rendezvous(const GivenOptions& flags, SupervisorOptions& options) {
  NodesOptions& nodes = options.nodes;
  read_node_count(flags, nodes);
  read_rendezvous_configuration(flags, nodes);
  options.run_id = flags.text("--rdzv-id", "none");
  const std::string backend = flags.text("--rdzv-backend", "static");
  if (backend == "etcd" || backend == "etcd-v2")
    throw UsageError(
        fmt::format("--rdzv-backend {}: phalanx launch needs no etcd: c10d does the same through a store that "
                    "one of the nodes hosts",
                    backend));
  if (backend != "static" && backend != "c10d")
    throw UsageError(fmt::format("--rdzv-backend is '{}'{}: expected static or c10d", backend,
                                 did_you_mean(backend, {"static", "c10d"})));
  const int master_port = flags.integer("--master-port", 0, 65'535, 0);
  const int node_rank = flags.integer("--node-rank", 0, 99'999, 0);
  if (flags.has("--standalone")) {
    if (nodes.max_nodes > 1) throw UsageError("--standalone is for one node, and --nnodes asks for more");
    options.run_id = generate_job_secret().substr(0, 16);
  }
  nodes.fixed_node_ranks = backend == "static" && !flags.has("--standalone");
  if (nodes.fixed_node_ranks) {
    if (nodes.min_nodes != nodes.max_nodes)
      throw UsageError(fmt::format("--nnodes {}: a number of nodes that may vary needs --rdzv-backend c10d",
                                   flags.text("--nnodes")));
    if (node_rank >= nodes.max_nodes)
      throw UsageError(fmt::format("--node-rank is {}: expected 0 to {}, with --nnodes {}", node_rank,
                                   nodes.max_nodes - 1, nodes.max_nodes));
    nodes.node_rank = node_rank;
  } else if (flags.find("--node-rank") != nullptr) {
    log::warn("--node-rank is for --rdzv-backend static; it is ignored");
  }
  if (nodes.max_nodes == 1) {
    options.master_port = master_port;
    return;
  }
  if (const auto* endpoint = flags.find("--rdzv-endpoint"); endpoint != nullptr && !endpoint->value.empty()) {
    nodes.endpoint =
        read_endpoint(endpoint->written, endpoint->value, nodes.fixed_node_ranks ? kStaticPort : kDynamicPort);
    options.master_port = master_port;
  } else if (const auto* address = flags.find("--master-addr"); nodes.fixed_node_ranks && address != nullptr) {
    const bool is_v6 = address->value.find(':') != std::string::npos && !address->value.starts_with('[');
    const std::string host = is_v6 ? fmt::format("[{}]", address->value) : address->value;
    nodes.endpoint = read_endpoint(address->written, host, master_port == 0 ? kStaticPort : master_port);
  } else {
    throw UsageError(fmt::format("--nnodes {}: where is the rendezvous? Give --rdzv-endpoint HOST[:PORT]{}",
                                 flags.text("--nnodes"),
                                 nodes.fixed_node_ranks ? ", or --master-addr and --master-port" : ""));
  }
}

StreamChoice read_streams(const GivenOptions& flags, const std::string& flag, int ranks) {
  const auto* given = flags.find(flag);
  if (given == nullptr) return {};
  StreamChoice choice = StreamChoice::parse(given->written, given->value);
  for (const auto& [local_rank, value] : choice.by_local_rank)
    if (local_rank >= ranks)
      throw UsageError(fmt::format("{} is '{}': there is no local rank {}: --nproc-per-node is {}", given->written,
                                   given->value, local_rank, ranks));
  return choice;
}

void read_output(const GivenOptions& flags, SupervisorOptions& options) {
  WorkerLogOptions& logs = options.logs;
  logs.directory = flags.text("--log-dir");
  logs.redirects = read_streams(flags, "--redirects", options.ranks);
  logs.tee = read_streams(flags, "--tee", options.ranks);
  if (const auto* given = flags.find("--local-ranks-filter"); given != nullptr && !given->value.empty()) {
    for (const std::string& item : split_list(given->value)) {
      const auto local_rank = number_of(item, 0, options.ranks - 1);
      if (!local_rank)
        throw UsageError(fmt::format("{} is '{}': expected local ranks from 0 to {}, such as 0,1", given->written,
                                     given->value, options.ranks - 1));
      logs.shown.insert(*local_rank);
    }
  }
  const std::string filters[2] = {"--duplicate-stdout-filters", "--duplicate-stderr-filters"};
  for (int stream = 0; stream < 2; ++stream) {
    const auto* given = flags.find(filters[stream]);
    if (given == nullptr || given->value.empty()) continue;
    if (logs.tee.is_empty())
      throw UsageError(fmt::format("{} chooses among the lines of --tee, which is not given", given->written));
    std::string text = given->value;
    for (std::size_t at = text.find(",,"); at != std::string::npos; at = text.find(",,", at))
      text.replace(at, 2, 1, '\0');
    for (std::string item : split_list(text)) {
      std::replace(item.begin(), item.end(), '\0', ',');
      if (!item.empty()) logs.filters[stream].push_back(item);
    }
  }
  const auto prefix = options.environment.find("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE");
  if (prefix != options.environment.end() && !prefix->second.empty()) logs.prefix = prefix->second;
}

int read_signal(const std::string& written, const std::string& name) {
  const auto signal = signal_of_name(name);
  if (signal && *signal != SIGCHLD) return *signal;
  throw UsageError(fmt::format("{}: '{}' is not a signal that can be handled: expected names such as SIGTERM,SIGUSR1",
                               written, name));
}

void read_ending(const GivenOptions& flags, SupervisorOptions& options) {
  if (const auto* given = flags.find("--signals-to-handle"); given != nullptr && !given->value.empty()) {
    std::set<int> signals;
    for (const std::string& name : split_list(given->value)) signals.insert(read_signal(given->written, name));
    options.stop_signals.assign(signals.begin(), signals.end());
  }
  std::string written = "--shutdown-timeout", value = flags.text(written);
  if (const auto* given = flags.find(written)) {
    written = given->written;
  } else if (const auto variable = options.environment.find("TORCH_ELASTIC_SHUTDOWN_TIMEOUT");
             variable != options.environment.end()) {
    written = variable->first;
    value = variable->second;
  }
  if (value.empty() && flags.find("--shutdown-timeout") == nullptr) return;
  const auto seconds = positive_number_of(value, /*zero_too=*/true);
  if (!seconds) throw UsageError(fmt::format("{} is '{}': expected seconds", written, value));
  options.interrupt_grace = options.terminate_grace = options.failure_grace = milliseconds_of(*seconds);
}

void read_binding(const GivenOptions& flags, SupervisorOptions& options) {
  const auto* mode = flags.find("--numa-binding");
  const auto* lists = flags.find("--cpu-binding");
  if (mode != nullptr && lists != nullptr) throw UsageError("--numa-binding and --cpu-binding exclude each other");
  if (mode != nullptr) options.binding.mode = parse_numa_binding(mode->written, mode->value);
  if (lists == nullptr) return;
  std::istringstream text(lists->value + ":");
  for (std::string list; std::getline(text, list, ':');)
    options.binding.lists.push_back(parse_cpu_list(lists->written, list));
}

// Checks flags that job scripts use but that have no effect here.
void check_accepted(const GivenOptions& flags) {
  if (const auto* given = flags.find("--monitor-interval"); given && !positive_number_of(given->value, false))
    throw UsageError(fmt::format("{} is '{}': expected seconds", given->written, given->value));
  const std::vector<std::string> methods{"spawn", "fork", "forkserver"};
  if (const auto* given = flags.find("--start-method");
      given && std::find(methods.begin(), methods.end(), given->value) == methods.end())
    throw UsageError(
        fmt::format("{} is '{}'{}: expected spawn, fork or forkserver; whichever it is, ranks are started "
                    "by exec",
                    given->written, given->value, did_you_mean(given->value, methods)));
  if (const auto* given = flags.find("--event-log-handler"); given && given->value != "null")
    throw UsageError(
        fmt::format("{} is '{}': expected null: torchrun's other handlers are Python classes, and no event "
                    "log is written",
                    given->written, given->value));
}

void check_program(const Arguments& command) {
  if (command.empty())
    throw UsageError("no program given; for example: phalanx launch --nproc-per-node 2 ./my_program");
  const std::string& program = command.front();
  if (program.ends_with(".py") && access(program.c_str(), F_OK) == 0 && access(program.c_str(), X_OK) != 0)
    throw UsageError(fmt::format("'{}' is not executable, and programs are started as they are: write `python {}`",
                                 program, program));
}

}  // namespace

int parse_rank_count(const std::string& flag, const std::string& value, const EnvironmentMap& environment,
                     const std::filesystem::path& root) {
  if (value == "auto") {
    const int gpus = count_visible_gpus(environment, root);
    return gpus > 0 ? gpus : usable_cores();
  }
  if (value == "cpu") return usable_cores();
  if (value == "gpu") {
    const int gpus = count_visible_gpus(environment, root);
    if (gpus == 0) {
      const auto chosen = environment.find("CUDA_VISIBLE_DEVICES");
      throw UsageError(fmt::format(
          "{} gpu: this node has no GPU that is visible{}", flag,
          chosen == environment.end() ? "" : fmt::format(" (CUDA_VISIBLE_DEVICES is '{}')", chosen->second)));
    }
    return gpus;
  }
  const auto number = number_of(value, 1, 4096);
  if (!number)
    throw UsageError(fmt::format("{} is '{}': expected a number from 1 to 4096, auto, gpu or cpu", flag, value));
  return *number;
}

LaunchArguments parse_launch_arguments(const Arguments& arguments, const EnvironmentMap& environment) {
  LaunchArguments result;
  SupervisorOptions& options = result.options;
  CLI::App app;
  app.prefix_command();
  for (const char* names : kValues) app.add_option(names)->type_name("TEXT")->take_last();
  for (const char* name : kFlags) app.add_flag(name)->disable_flag_override();
  for (const auto& [name, reason] : kRefused) app.add_option(name)->expected(0, 1)->take_last();
  try {
    options.command = parse_options(app, arguments);
  } catch (const CLI::CallForHelp&) {
    result.help = true;
    return result;
  }
  const GivenOptions given(app, environment);
  options.environment = environment;
  if (const auto* ranks = given.find("--nproc-per-node"))
    options.ranks = parse_rank_count(ranks->written, ranks->value, environment);
  options.max_restarts = given.integer("--max-restarts", 0, 1'000'000, 0);
  options.role = given.text("--role", "default");
  options.nodes.local_address = given.text("--local-addr");
  options.virtual_local_rank = given.has("--virtual-local-rank");
  check_accepted(given);
  read_rendezvous(given, options);
  read_output(given, options);
  read_ending(given, options);
  read_binding(given, options);
  check_program(options.command);
  return result;
}

}  // namespace phalanx::cli
