#include "cli/front/launch_command.h"

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "phalanx/base/cpu.h"
#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/supervisor/visible_gpus.h"

namespace phalanx::cli {
namespace {

// The options of a command line that ends with a program.
SupervisorOptions launch_options(Arguments arguments, const EnvironmentMap& environment = {}) {
  arguments.emplace_back("prog");
  return parse_launch_arguments(arguments, environment).options;
}

std::string launch_error(const Arguments& arguments, const EnvironmentMap& environment = {}) {
  try {
    parse_launch_arguments(arguments, environment);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_status(), 2);
    return error.what();
  }
  return "";
}

TEST(LaunchCommandTest, TakesTorchrunsSpellings) {
  for (const Arguments& head : std::vector<Arguments>{{"--nproc-per-node", "4"},
                                                      {"--nproc_per_node=4"},
                                                      {"--nproc-per_node", "4"},
                                                      {"-n", "4"},
                                                      {"-n4"},
                                                      {"-n=4"},
                                                      {"--standalone", "--nnodes=1", "--nproc_per_node", "4"},
                                                      {"--no_python", "--nnodes", "1:1", "-n", "4", "--"}}) {
    Arguments arguments = head;
    for (const char* rest : {"prog", "--nproc-per-node", "9", "--", "x"}) arguments.emplace_back(rest);
    const auto parsed = parse_launch_arguments(arguments, {});
    EXPECT_EQ(parsed.options.ranks, 4);
    EXPECT_THAT(parsed.options.command, ElementsAre("prog", "--nproc-per-node", "9", "--", "x"));
  }
  EXPECT_EQ(launch_options({}).ranks, 1);
  EXPECT_EQ(launch_options({"-n", "cpu"}).ranks, usable_cores());
  EXPECT_TRUE(parse_launch_arguments({"--help"}).help);
}

// A machine with `count` GPUs: its files in /dev and the driver's folder in /proc.
class GpuNode {
 public:
  explicit GpuNode(int gpus) : root_("gpus") {
    std::filesystem::create_directories(root_.path() / "dev");
    for (const char* other : {"nvidiactl", "nvidia-uvm", "nvidia", "null"}) write(std::string("dev/") + other, "");
    for (int i = 0; i < gpus; ++i) {
      const std::string number = std::to_string(i);
      write("dev/nvidia" + number, "");
      write("proc/driver/nvidia/gpus/0000:0" + number + ":00.0/information",
            "Model: X\nGPU UUID: \t GPU-" + number + "a1b\nBus: 1\n");
    }
  }
  int count(const std::string& value, const EnvironmentMap& environment = {}) const {
    return parse_rank_count("-n", value, environment, root_.path());
  }
  int visible(const std::string& list) const { return count("gpu", {{"CUDA_VISIBLE_DEVICES", list}}); }
  const std::filesystem::path& root() const { return root_.path(); }

 private:
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root_.path() / path).parent_path());
    std::ofstream(root_.path() / path) << text;
  }
  TempDirectory root_;
};

TEST(LaunchCommandTest, RanksAreCountedByGpusAndCores) {
  const GpuNode four(4), none(0);
  EXPECT_EQ(four.count("gpu"), 4);
  EXPECT_EQ(four.count("auto"), 4);
  EXPECT_EQ(four.count("cpu"), usable_cores());
  EXPECT_EQ(four.count("2"), 2);
  EXPECT_EQ(none.count("auto"), usable_cores());
  EXPECT_EQ(four.count("auto", {{"CUDA_VISIBLE_DEVICES", ""}}), usable_cores()) << "an empty list hides all GPUs";
  EXPECT_THROW(none.count("gpu"), UsageError);
  const auto error = [&](const std::string& list) { return error_text<UsageError>([&] { four.visible(list); }); };
  for (const char* hidden : {"", "-1", "-1,0", "4", "x", "0,0", "GPU-9", "GPU-"})
    EXPECT_EQ(error(hidden),
              std::string("-n gpu: this node has no GPU that is visible (CUDA_VISIBLE_DEVICES is '") + hidden + "')");
  EXPECT_EQ(four.visible("2"), 1);
  EXPECT_EQ(four.visible("3, 1 ,0"), 3);
  EXPECT_EQ(four.visible("0,-1"), 1);
  EXPECT_EQ(four.visible("0,-1,1,2"), 1) << "what follows an entry that is no GPU is not visible";
  EXPECT_EQ(four.visible("1,9,2"), 1);
  EXPECT_EQ(four.visible("0,,1"), 1);
  EXPECT_EQ(four.visible("GPU-2a1b,GPU-0"), 2);
  EXPECT_EQ(four.visible("GPU-2,GPU-7,GPU-0"), 1);
  EXPECT_EQ(four.visible("MIG-11,MIG-22,MIG-33"), 1);
  // A container may have the devices but not the driver's folder. Then UUIDs are accepted.
  std::filesystem::remove_all(four.root() / "proc");
  EXPECT_EQ(four.visible("GPU-x,GPU-y"), 2);
}

TEST(LaunchCommandTest, ListedGpusAreThoseThatCudaGivesAProgram) {
  const GpuNode four(4), none(0);
  EXPECT_THAT(listed_gpus("3, 1 ,0", four.root()), ElementsAre("3", "1", "0"));
  EXPECT_THAT(listed_gpus("GPU-2a,0", four.root()), ElementsAre("GPU-2a", "0"));
  EXPECT_THAT(listed_gpus("1,-1,2", four.root()), ElementsAre("1"));
  EXPECT_THAT(listed_gpus("1,4,2", four.root()), ElementsAre("1"));
  EXPECT_THAT(listed_gpus("MIG-1,MIG-2", four.root()), ElementsAre("MIG-1", "MIG-2"));
  EXPECT_THAT(listed_gpus("0,MIG-1", four.root()), ElementsAre("0"));
  for (const char* hidden : {"", "-1,0", "0,0", "x"}) EXPECT_TRUE(listed_gpus(hidden, four.root()).empty()) << hidden;
  // The files of GPUs may be missing, for example in a container.
  EXPECT_THAT(listed_gpus("7,5,-1,3", none.root()), ElementsAre("7", "5"));
}

TEST(LaunchCommandTest, FlagsMayComeFromTheEnvironment) {
  const EnvironmentMap environment{{"PET_NPROC_PER_NODE", "3"},  {"PET_NNODES", "2"},
                                   {"PET_RDZV_BACKEND", "c10d"}, {"PET_RDZV_ENDPOINT", "n1"},
                                   {"PET_MAX_RESTARTS", "5"},    {"PET_VIRTUAL_LOCAL_RANK", "1"}};
  const auto options = launch_options({"-n", "4"}, environment);
  EXPECT_EQ(options.ranks, 4) << "a flag goes before its variable";
  EXPECT_EQ(options.nodes.max_nodes, 2);
  EXPECT_EQ(options.max_restarts, 5);
  EXPECT_TRUE(options.virtual_local_rank);
  EXPECT_FALSE(launch_options({}, {{"PET_STANDALONE", "0"}, {"PET_NNODES", ""}}).virtual_local_rank);
  EXPECT_THAT(launch_error({"prog"}, {{"PET_MAX_RESTARTS", "many"}}), HasSubstr("PET_MAX_RESTARTS is 'many'"));
  EXPECT_THAT(launch_error({"prog"}, {{"PET_STANDALONE", "yes"}}),
              HasSubstr("PET_STANDALONE is 'yes': expected 0 or 1"));
}

TEST(LaunchCommandTest, TheLastOfARepeatedOptionCounts) {
  const auto options =
      launch_options({"-n", "2", "--role=a", "--nproc_per_node=3", "--role", "b", "--standalone", "--standalone"});
  EXPECT_EQ(options.ranks, 3);
  EXPECT_EQ(options.role, "b");
}

TEST(LaunchCommandTest, FlagsGoBeforeTheEnvironmentAndThatBeforeDefaults) {
  const EnvironmentMap environment{{"PET_ROLE", "worker"},      {"PET_NODE_RANK", "1"},
                                   {"PET_NNODES", "2"},         {"PET_MASTER_ADDR", "n1"},
                                   {"PET_STANDALONE", "0"},     {"PET_TEE", "3"},
                                   {"PET_LOG_DIR", "from_env"}, {"PET_SHUTDOWN_TIMEOUT", "4"},
                                   {"PET_NO_PYTHON", "1"},      {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9"}};
  const auto options = launch_options({"--log_dir=given", "--node-rank=0"}, environment);
  EXPECT_EQ(options.role, "worker");
  EXPECT_EQ(options.nodes.max_nodes, 2);
  EXPECT_EQ(options.nodes.node_rank, 0);
  EXPECT_EQ(options.nodes.endpoint.text(), "n1:29500");
  EXPECT_EQ(options.logs.directory, "given");
  EXPECT_EQ(options.logs.tee.all, 3);
  EXPECT_EQ(options.terminate_grace, std::chrono::seconds(4));
  EXPECT_EQ(launch_options({"--log-dir="}, environment).logs.directory, "") << "an empty value is a value";
  EXPECT_THAT(launch_error({"prog"}, {{"PET_NODE_RANK", "x"}}),
              HasSubstr("PET_NODE_RANK is 'x': expected a whole number from 0 to 99999"));
}

// The program's words are not looked at: options, `--`, empty words, brackets and underscores stay as they are.
TEST(LaunchCommandTest, EverythingAfterTheProgramIsTheProgramsOwn) {
  const Arguments words{"prog", "-n", "9", "--no_python", "--bogus", "--", "", "[a,b]", "--help", "--log_dir=x"};
  for (const Arguments& head : std::vector<Arguments>{{}, {"--"}, {"-n", "2"}, {"-n2", "--no-python", "--"}}) {
    Arguments arguments = head;
    arguments.insert(arguments.end(), words.begin(), words.end());
    const auto parsed = parse_launch_arguments(arguments, {});
    EXPECT_EQ(parsed.options.command, words);
    EXPECT_FALSE(parsed.help);
  }
  EXPECT_THAT(parse_launch_arguments({"--", "-n", "4"}, {}).options.command, ElementsAre("-n", "4"));
  EXPECT_THAT(parse_launch_arguments({"--", "--", "x"}, {}).options.command, ElementsAre("--", "x"));
  for (const char* value : {"[fd00::1]:29500", "--prog", "--"})  // any word is the value of an option before it
    EXPECT_EQ(launch_options({"--role", value}).role, value);
  EXPECT_EQ(launch_options({"--nnodes=2", "--rdzv-endpoint", "[fd00::1]"}).nodes.endpoint.text(), "[fd00::1]:29500");
  EXPECT_TRUE(parse_launch_arguments({"-n", "2", "-h", "--bogus"}, {}).help);
}

TEST(LaunchCommandTest, TheStaticRendezvous) {
  auto nodes = launch_options({"--nnodes=4", "--node_rank=3", "--master_addr=10.0.0.1", "--master_port=6000"}).nodes;
  EXPECT_TRUE(nodes.fixed_node_ranks);
  EXPECT_EQ(nodes.node_rank, 3);
  EXPECT_EQ(nodes.endpoint.text(), "10.0.0.1:6000");
  EXPECT_EQ(launch_options({"--nnodes=2", "--master-addr=n1"}).nodes.endpoint.text(), "n1:29500");
  EXPECT_EQ(launch_options({"--nnodes=2", "--master-addr=fd00::1"}).nodes.endpoint.text(), "[fd00::1]:29500");
  const auto both = launch_options({"--nnodes=2", "--rdzv-endpoint=n1:4000", "--master-port=5000"});
  EXPECT_EQ(both.nodes.endpoint.text(), "n1:4000");
  EXPECT_EQ(both.master_port, 5000);
  EXPECT_EQ(launch_options({"--master-port=5000", "--rdzv-endpoint=localhost:0"}).master_port, 5000);
  EXPECT_THAT(launch_error({"--nnodes=2", "prog"}), HasSubstr("where is the rendezvous? Give --rdzv-endpoint"));
  EXPECT_THAT(launch_error({"--nnodes=2", "--node-rank=2", "--master-addr=n1", "prog"}), HasSubstr("expected 0 to 1"));
  EXPECT_THAT(launch_error({"--nnodes=1:2", "--master-addr=n1", "prog"}), HasSubstr("needs --rdzv-backend c10d"));
  EXPECT_THAT(launch_error({"--nnodes=2", "--rdzv-endpoint=n1:0", "prog"}),
              HasSubstr("the rendezvous needs a port that all nodes know"));
  EXPECT_THAT(launch_error({"--master-port=70000", "prog"}), HasSubstr("from 0 to 65535"));
  for (const char* bad : {"0", "2:1", "1:2:3", "x", "", "1:"})
    EXPECT_THAT(launch_error({"--nnodes", bad, "prog"}), HasSubstr("expected a number of nodes, or MIN:MAX")) << bad;
}

TEST(LaunchCommandTest, TheDynamicRendezvous) {
  using std::chrono::milliseconds;
  const Arguments head{"--nnodes=2:8", "--rdzv-backend=c10d", "--rdzv-endpoint=n1", "--rdzv-id=job7"};
  const auto with = [&](const std::string& configuration) {
    Arguments arguments = head;
    arguments.push_back("--rdzv-conf=" + configuration);
    return arguments;
  };
  const auto options =
      launch_options(with("join_timeout=20,last_call_timeout=0,close_timeout=1.5,read_timeout=7,is_host=false,bind=*,"
                          "keep_alive_interval=2,keep_alive_max_attempt=7"));
  EXPECT_EQ(options.run_id, "job7");
  EXPECT_EQ(options.nodes.min_nodes, 2);
  EXPECT_EQ(options.nodes.max_nodes, 8);
  EXPECT_FALSE(options.nodes.fixed_node_ranks);
  EXPECT_EQ(options.nodes.endpoint.text(), "n1:29400");
  EXPECT_EQ(options.nodes.join_timeout, milliseconds(20'000));
  EXPECT_EQ(options.nodes.last_call, milliseconds(0));
  EXPECT_EQ(options.nodes.close_timeout, milliseconds(1'500));
  EXPECT_EQ(options.nodes.read_timeout, milliseconds(7'000));
  EXPECT_EQ(options.nodes.keep_alive, milliseconds(2'000));
  EXPECT_EQ(options.nodes.missed_keep_alives, 7);
  EXPECT_EQ(launch_options(with("timeout=30")).nodes.join_timeout, milliseconds(30'000));
  EXPECT_EQ(options.nodes.is_host, false);
  EXPECT_EQ(options.nodes.bind_address, "*");
  const auto error = [&](const std::string& configuration) {
    auto arguments = with(configuration);
    arguments.emplace_back("prog");
    return launch_error(arguments);
  };
  EXPECT_THAT(error("join_timeot=1"), HasSubstr("unknown key 'join_timeot' (did you mean 'join_timeout'?)"));
  EXPECT_THAT(error("join_timeout=0"), HasSubstr("join_timeout is '0': expected seconds"));
  EXPECT_THAT(error("keep_alive_max_attempt=0"), HasSubstr("expected a number from 1 to 1000"));
  EXPECT_THAT(error("is_host=maybe"), HasSubstr("expected true or false"));
  EXPECT_THAT(error("join_timeout"), HasSubstr("'join_timeout' is not key=value"));
  EXPECT_THAT(error("store_type=file"), HasSubstr("expected tcp"));
  EXPECT_THAT(launch_error({"--rdzv-backend=etcd", "prog"}), HasSubstr("needs no etcd"));
  EXPECT_THAT(launch_error({"--rdzv-backend=c10", "prog"}), HasSubstr("did you mean 'c10d'"));
  EXPECT_THAT(launch_error({"--standalone", "--nnodes=2", "prog"}), HasSubstr("--standalone is for one node"));
  EXPECT_THAT(launch_error({"--nnodes=2", "--rdzv-backend=c10d", "--master-addr=n1", "prog"}),
              HasSubstr("Give --rdzv-endpoint"));
}

TEST(LaunchCommandTest, OutputFlags) {
  const auto options = launch_options({"-n", "12", "--log-dir=d", "-r3", "-t", "0:1,11:2", "--local_ranks_filter=0,11",
                                       "--duplicate-stdout-filters=apple,a,,b"},
                                      {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${rank}>"}});
  EXPECT_EQ(options.logs.directory, "d");
  EXPECT_EQ(options.logs.redirects.all, 3);
  EXPECT_EQ(options.logs.tee.of(11), 2);
  EXPECT_THAT(options.logs.shown, UnorderedElementsAre(0, 11));
  EXPECT_THAT(options.logs.filters[0], ElementsAre("apple", "a,b"));
  EXPECT_EQ(options.logs.prefix, "<${rank}>");
  EXPECT_THAT(launch_error({"-n", "2", "--tee=2:1", "prog"}),
              HasSubstr("there is no local rank 2: --nproc-per-node is 2"));
  EXPECT_THAT(launch_error({"--local-ranks-filter=1", "prog"}), HasSubstr("expected local ranks from 0 to 0"));
  EXPECT_THAT(launch_error({"--redirects=x", "prog"}), HasSubstr("--redirects is 'x'"));
  EXPECT_THAT(launch_error({"--duplicate-stderr-filters=x", "prog"}), HasSubstr("--tee, which is not given"));
}

TEST(LaunchCommandTest, EndingAndBinding) {
  const auto options = launch_options({"--signals-to-handle=SIGTERM,USR1", "--shutdown-timeout=7"});
  EXPECT_THAT(options.stop_signals, UnorderedElementsAre(SIGTERM, SIGUSR1));
  EXPECT_EQ(options.terminate_grace, std::chrono::seconds(7));
  EXPECT_EQ(launch_options({}, {{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9"}}).failure_grace, std::chrono::seconds(9));
  EXPECT_EQ(launch_options({"--numa-binding=core-complex"}).binding.mode, NumaBinding::core_complex);
  EXPECT_THAT(launch_options({"--cpu-binding=0-1:4"}).binding.lists, ElementsAre(ElementsAre(0, 1), ElementsAre(4)));
  EXPECT_THAT(launch_error({"--signals-to-handle=SIGFOO", "prog"}), HasSubstr("'SIGFOO' is not a signal"));
  EXPECT_THAT(launch_error({"--signals-to-handle=SIGKILL", "prog"}), HasSubstr("'SIGKILL' is not a signal that can"));
  EXPECT_THAT(launch_error({"--shutdown-timeout=-1", "prog"}), HasSubstr("expected seconds"));
  EXPECT_THAT(launch_error({"--monitor-interval=0", "prog"}), HasSubstr("expected seconds"));
  EXPECT_THAT(launch_error({"--numa-binding=numa", "prog"}),
              HasSubstr("expected node, socket, exclusive or core-complex"));
  EXPECT_THAT(launch_error({"--numa-binding=node", "--cpu-binding=0", "prog"}), HasSubstr("exclude each other"));
}

TEST(LaunchCommandTest, TakesWhatJobScriptsSayAndMeansNothingHere) {
  for (const char* method : {"spawn", "fork", "forkserver"})
    EXPECT_EQ(launch_error({"--start-method", method, "--event_log_handler=null", "prog"}), "");
  EXPECT_EQ(launch_error({"prog"}, {{"PET_START_METHOD", "spawn"}, {"PET_EVENT_LOG_HANDLER", "null"}}), "");
  EXPECT_THAT(launch_error({"--start-method=exec", "prog"}),
              HasSubstr("--start-method is 'exec': expected spawn, fork or forkserver"));
  EXPECT_THAT(launch_error({"prog"}, {{"PET_START_METHOD", "spwan"}}),
              HasSubstr("PET_START_METHOD is 'spwan' (did you mean 'spawn'?)"));
  EXPECT_THAT(launch_error({"--event-log-handler", "console", "prog"}),
              HasSubstr("--event-log-handler is 'console': expected null"));
}

TEST(LaunchCommandTest, RefusesByName) {
  for (const char* flag : {"-m", "--module", "--run_path", "--logs-specs"})
    EXPECT_THAT(launch_error({flag, "x", "prog"}), AllOf(HasSubstr(flag), HasSubstr("torchrun"))) << flag;
  for (const char* variable : {"PET_MODULE", "PET_RUN_PATH", "PET_LOGS_SPECS"}) {
    EXPECT_THAT(
        launch_error({"prog"}, {{variable, "1"}}),
        HasSubstr(std::string(variable) + " ('1') is a variable of torchrun that phalanx launch does not take: "));
    for (const char* off : {"", "0"}) EXPECT_EQ(launch_error({"prog"}, {{variable, off}}), "") << variable;
  }
  EXPECT_THAT(launch_error({"--nproc-per-nod", "2", "prog"}), HasSubstr("did you mean '--nproc-per-node'"));
  for (const char* bad : {"0", "-1", "two", "2x", "", "5000"})
    EXPECT_THAT(launch_error({"-n", bad, "prog"}), HasSubstr("expected a number from 1 to 4096")) << bad;
  EXPECT_THAT(launch_error({"-n"}), HasSubstr("-n needs a value"));
  EXPECT_THAT(launch_error({"-n", "2"}), HasSubstr("no program"));
  EXPECT_THAT(launch_error({"-n", "2", "--"}), HasSubstr("no program"));
  EXPECT_THAT(launch_error({"--standalone=yes", "prog"}), HasSubstr("--standalone takes no value"));
  EXPECT_THAT(launch_error({"--role"}), HasSubstr("--role needs a value"));
  EXPECT_THAT(launch_error({"-x", "prog"}), HasSubstr("unknown option '-x'"));
  EXPECT_THAT(launch_error({"-n4", "--rdzv_bakend=c10d", "prog"}),
              HasSubstr("unknown option '--rdzv_bakend' (did you mean '--rdzv-backend'?)"));
  EXPECT_THAT(launch_error({"--max-restarts=1000001", "prog"}),
              HasSubstr("--max-restarts is '1000001': expected a whole number from 0 to 1000000"));
  EXPECT_THAT(launch_error({"--cpu-binding=0:", "prog"}), HasSubstr("--cpu-binding is ''"));
  EXPECT_THAT(launch_error({"--max-restarts=-1", "prog"}), HasSubstr("from 0 to"));
}

}  // namespace
}  // namespace phalanx::cli
