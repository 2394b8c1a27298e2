// Runs the real programs, as a user would, and looks at their output, exit status and files.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/base/temp_directory.h"

namespace phalanx::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string program() { return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "phalanx").string(); }

std::string contents(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

/// The processes that have this word on their command line.
std::vector<pid_t> processes_with(const std::string& word) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (contents(entry.path() / "cmdline").find(word) != std::string::npos) found.push_back(std::stoi(name));
  }
  return found;
}

/// The ranks that train by this configuration file.
std::vector<pid_t> workers_of(const std::string& config) {
  std::vector<pid_t> workers;
  for (const pid_t process : processes_with(config)) {
    if (contents("/proc/" + std::to_string(process) + "/cmdline").find("phalanx-worker") != std::string::npos) {
      workers.push_back(process);
    }
  }
  return workers;
}

struct Outcome {
  int status = -1;  // 128 + signal where one ended it
  std::string out;
  std::string err;
};

struct RunOptions {
  std::map<std::string, std::string> environment;
  rlim_t file_size_limit = RLIM_INFINITY;
  bool ignore_hang_up = false;  // SIGHUP, as nohup does
  enum class Streams { files, terminal, unread } streams = Streams::files;
  /// Of a terminal: asked again and again; once true the terminal is closed, as by the window's button.
  std::function<bool()> hang_up;
  /// Called with the process id again and again until it returns true or the process has ended.
  std::function<bool(pid_t)> meanwhile;
};

/// A terminal of 100 columns that the program under test is alone at; what it shows is collected.
class Terminal {
 public:
  ~Terminal() { close(); }
  void open() {
    master_ = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    ASSERT_TRUE(master_ >= 0 && ::grantpt(master_) == 0 && ::unlockpt(master_) == 0);
    const winsize size{.ws_row = 30, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};
    ::ioctl(master_, TIOCSWINSZ, &size);
    slave_ = ::ptsname(master_);
  }
  /// In the child: leads a session with this terminal.
  void take() const {
    ::setsid();
    const int slave = ::open(slave_.c_str(), O_RDWR);
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(slave, fd);
    ::close(slave);
  }
  void read() {
    char chunk[4096];
    for (ssize_t got; master_ >= 0 && (got = ::read(master_, chunk, sizeof chunk)) > 0;) {
      text_.append(chunk, static_cast<std::size_t>(got));
    }
  }
  void close() {
    if (master_ >= 0) ::close(master_);
    master_ = -1;
  }
  const std::string& text() const { return text_; }

 private:
  int master_ = -1;
  std::string slave_, text_;
};

class ProgramTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  void write(const std::string& name, const std::string& text) const { std::ofstream(path(name)) << text; }

  Outcome run(const std::vector<std::string>& arguments, const RunOptions& options = {}) const {
    using Streams = RunOptions::Streams;
    const std::string out = path("stdout.txt"), err = path("stderr.txt");
    Terminal terminal;
    if (options.streams == Streams::terminal) terminal.open();
    const pid_t child = ::fork();
    if (child == 0) {
      // A group of its own, so that whatever it starts can be ended with it.
      if (options.streams == Streams::terminal) {
        terminal.take();
      } else {
        ::setpgid(0, 0);
        ::dup2(::open(out.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDOUT_FILENO);
        ::dup2(::open(err.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDERR_FILENO);
      }
      if (int ends[2]; options.streams == Streams::unread && ::pipe(ends) == 0) {
        ::close(ends[0]);
        ::dup2(ends[1], STDOUT_FILENO);
        ::dup2(ends[1], STDERR_FILENO);
      }
      for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
        ::unsetenv(name);
      }
      for (const auto& [name, value] : options.environment) ::setenv(name.c_str(), value.c_str(), 1);
      ::signal(SIGHUP, options.ignore_hang_up ? SIG_IGN : SIG_DFL);  // whatever the tests were started with
      if (options.file_size_limit != RLIM_INFINITY) {
        ::signal(SIGXFSZ, SIG_IGN);  // a write past the limit then fails, as on a full disk
        const rlimit limit{options.file_size_limit, options.file_size_limit};
        ::setrlimit(RLIMIT_FSIZE, &limit);
      }
      std::vector<std::string> words = {program()};
      words.insert(words.end(), arguments.begin(), arguments.end());
      std::vector<char*> argv;
      for (std::string& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    bool busy = static_cast<bool>(options.meanwhile);
    int status = 0;
    while (::waitpid(child, &status, WNOHANG) == 0) {
      if (busy && options.meanwhile(child)) busy = false;
      terminal.read();
      if (options.hang_up && options.hang_up()) terminal.close();
      if (std::chrono::steady_clock::now() > deadline) {
        ADD_FAILURE() << "still running after 120 s: " << arguments[0] << "\n" << contents(err);
        ::kill(-child, SIGKILL);
        ::waitpid(child, &status, 0);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    terminal.read();
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (options.streams == Streams::terminal) return {code, terminal.text(), ""};
    return {code, contents(out), contents(err)};
  }

  /// A configuration that trains in a second or two; the token file has 512 ids.
  std::string config(const std::string& more = "") const {
    std::string tokens;
    std::uint32_t value = 1;
    for (int i = 0; i < 4000; ++i) {
      value = value * 1664525U + 1013904223U;
      const std::uint32_t id = (value >> 16) % 512 * ((value >> 8) % 512) / 512;
      tokens += static_cast<char>(id & 255U);
      tokens += static_cast<char>(id >> 8);
    }
    std::ofstream(path("tokens.bin"), std::ios::binary) << tokens;
    write("run.toml", "[job]\ndump_folder = \"" + path("run") + "\"\n[model]\nflavor = \"debug\"\n[training]\n" +
                          "dataset_path = \"" + path("tokens.bin") + "\"\nseq_len = 32\nlocal_batch_size = 4\n" +
                          "steps = 8\n[lr_scheduler]\nwarmup_steps = 2\n" + more);
    return path("run.toml");
  }

  /// One clear message: the program's name, the text, the status; no second copy and no trace of a crash.
  static void expect_one_error(const Outcome& outcome, int status, const std::string& text) {
    EXPECT_EQ(outcome.status, status) << outcome.err;
    EXPECT_EQ(count(outcome.err, text), 1) << outcome.err;
    EXPECT_THAT(outcome.err, Not(HasSubstr("terminate called")));
  }

 private:
  TempDirectory folder_{"program-test"};
};

TEST_F(ProgramTest, HelpAndVersion) {
  const Outcome help = run({"--help"});
  EXPECT_EQ(help.status, 0);
  for (const char* name : {"train", "tokenize", "generate", "launch", "report", "trace", "doctor"}) {
    EXPECT_THAT(help.out, HasSubstr(std::string("\n  ") + name));
    const Outcome own = run({name, "--help"});
    EXPECT_EQ(own.status, 0) << name << own.err;
    EXPECT_THAT(own.out, HasSubstr(std::string("phalanx ") + name));
  }
  EXPECT_THAT(run({"version"}).out, HasSubstr("phalanx "));
  EXPECT_EQ(run({}).status, 2);
}

TEST_F(ProgramTest, UnknownCommandNamesTheNearest) {
  const Outcome outcome = run({"trian"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("unknown command 'trian' (did you mean 'train'?)"));
}

TEST_F(ProgramTest, ConfigurationErrorsEndWithStatus2) {
  expect_one_error(run({"train", path("missing.toml")}), 2, "missing.toml': No such file");
  expect_one_error(run({"train"}), 2, "expected a configuration file");
  expect_one_error(run({"train", config("[training\n")}), 2, "not valid TOML");
  expect_one_error(run({"train", config("[optimizer]\nlearning_rate = 1\n")}), 2,
                   "unknown key [optimizer] learning_rate");
  expect_one_error(run({"train", config(), "--compile.enable"}), 2, "[compile] enable = true is not supported");
  expect_one_error(run({"train", "-n", "0", config()}), 2, "-n");
  expect_one_error(run({"train", "-n", "2", config(), "--training.stpes", "3"}), 2, "did you mean 'steps'?");
}

TEST_F(ProgramTest, PrintedConfigurationReadsBackTheSame) {
  const Outcome first = run({"train", config(), "--print-config", "--training.steps=3"});
  ASSERT_EQ(first.status, 0) << first.err;
  EXPECT_THAT(first.out, AllOf(HasSubstr("\nsteps = 3\n"), HasSubstr("\ndim = 64\n")));
  write("printed.toml", first.out);
  EXPECT_EQ(run({"train", path("printed.toml"), "--print-config"}).out, first.out);
}

TEST_F(ProgramTest, DoctorFindsNothingMissingHere) {
  const Outcome outcome = run({"doctor"});
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("libtorch"), HasSubstr("cores"), HasSubstr("shared memory")));
}

TEST_F(ProgramTest, TrainsOnOneRankAndWritesTheReport) {
  const Outcome outcome = run({"train", config("[validation]\nenable = true\nfraction = 0.2\n")});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.err, ::testing::ContainsRegex("step:  1  loss:  [0-9]\\.[0-9]{5}  grad_norm: "));
  EXPECT_THAT(outcome.err, HasSubstr("validate step:  8  loss: "));
  EXPECT_THAT(contents(path("run/report.html")), HasSubstr("validation loss"));
  EXPECT_EQ(nlohmann::json::parse(contents(path("run/run.json")))["status"], "finished");
  EXPECT_EQ(count(contents(path("run/metrics.jsonl")), "\"loss\""), 8);
  EXPECT_EQ(run({"report", path("run")}).status, 0);
}

TEST_F(ProgramTest, StoppedBySigtermTwoRanksSaveAndContinueWithTheSameBits) {
  const std::string file = config();
  const std::string folder = path("whole");
  const Outcome whole = run({"train", "-n", "2", file, "--training.steps=30", "--job.dump_folder", folder});
  ASSERT_EQ(whole.status, 0) << whole.err;

  const std::vector<std::string> command = {"train", "-n", "2", file, "--training.steps=30"};
  Outcome stopped;
  // Where this test gets no processor for a while, the ranks are through with their steps before the signal: once more.
  for (int tries = 0; tries < 5; ++tries) {
    std::filesystem::remove_all(path("run"));
    stopped = run(command, {.meanwhile = [&](pid_t launcher) {
                    if (count(contents(path("run/metrics.jsonl")), "\n") < 3) return false;
                    ::kill(launcher, SIGTERM);
                    return true;
                  }});
    ASSERT_EQ(stopped.status, 0) << stopped.err;
    if (nlohmann::json::parse(contents(path("run/run.json")))["status"] != "finished") break;
  }
  EXPECT_THAT(stopped.err, HasSubstr("stopped on request after step"));
  EXPECT_EQ(nlohmann::json::parse(contents(path("run/run.json")))["status"], "stopped");

  const Outcome resumed = run(command);
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("continuing from"));
  int shards = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path("whole/checkpoint/step-30"))) {
    if (entry.path().extension() != ".safetensors") continue;
    ++shards;
    EXPECT_EQ(contents(entry.path()), contents(path("run/checkpoint/step-30/" + entry.path().filename().string())));
  }
  EXPECT_EQ(shards, 2);
}

// In processes and shared memory, where the collectives are others than between threads: see trainer_sharded_test.cc.
TEST_F(ProgramTest, ShardedRanksHaveTheBitsOfDataParallelismAndGoOnInAnotherLayout) {
  const std::string file = config();
  const auto losses_of = [&](const std::string& folder) {
    std::vector<std::pair<double, double>> values;
    std::istringstream lines(contents(path(folder + "/metrics.jsonl")));
    for (std::string line; std::getline(lines, line);) {
      const auto entry = nlohmann::json::parse(line);
      values.emplace_back(entry["loss"], entry["grad_norm"]);
    }
    return values;
  };
  const auto train = [&](const std::string& ranks, const std::string& folder, std::vector<std::string> keys) {
    keys.insert(keys.begin(), {"train", "-n", ranks, file, "--training.global_batch_size=8",
                               "--training.local_batch_size=" + std::to_string(8 / std::stoi(ranks)),
                               "--job.dump_folder", path(folder)});
    const Outcome outcome = run(keys);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return outcome.err;
  };
  for (const std::string ranks : {"2", "4"}) {
    train(ranks, "ddp" + ranks, {});
    const auto expected = losses_of("ddp" + ranks);
    ASSERT_EQ(expected.size(), 8U);
    for (const std::string stage : {"1", "3"}) {
      const std::string folder = "zero" + stage + "-" + ranks;
      const std::string log =
          train(ranks, folder, {"--parallelism.data_parallel_shard_degree=-1", "--parallelism.zero_stage=" + stage});
      EXPECT_THAT(log, HasSubstr("layout: " + ranks + " ranks, ZeRO-" + stage + " over " + ranks));
      EXPECT_EQ(losses_of(folder), expected) << folder;
    }
  }
  const std::string log = train("2", "zero3-4", {"--training.steps=10"});  // four ranks' rows, whole on two
  EXPECT_THAT(log, HasSubstr("continuing from"));
  EXPECT_EQ(losses_of("zero3-4").size(), 10U);
}

TEST_F(ProgramTest, DataErrorsOfTwoRanksAreToldOnce) {
  for (const char* ranks : {"1", "2"}) {
    expect_one_error(run({"train", "-n", ranks, config(), "--training.dataset_path=/nonexistent/t.bin"}), 1,
                     "/nonexistent/t.bin");
    expect_one_error(run({"train", "-n", ranks, config(), "--training.global_batch_size=7"}), 2,
                     "global_batch_size 7 is not a multiple of local_batch_size 4 x " + std::string(ranks));
  }
}

// What one rank does for all, or all do alike: one error, and no list of ranks that lost each other.
TEST_F(ProgramTest, FoldersAndCheckpointsOfTwoRanksAreToldOnce) {
  const std::string file = config();
  const auto expect_shared_error = [&](const std::vector<std::string>& more, const std::string& text) {
    std::vector<std::string> command = {"train", "-n", "2", file};
    command.insert(command.end(), more.begin(), more.end());
    const Outcome outcome = run(command);
    expect_one_error(outcome, 1, text);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("\nthe same on rank "), Not(HasSubstr("other failures"))));
    EXPECT_THAT(outcome.err, Not(HasSubstr(" - warning - ")));
  };
  expect_shared_error({"--job.dump_folder", file, "--checkpoint.no-enable"},
                      "cannot make directory " + file + ": Not a directory");
  expect_shared_error({"--job.dump_folder", file}, "cannot make directory " + file + "/checkpoint: Not a directory");

  ASSERT_EQ(run({"train", "-n", "2", file, "--training.steps=1"}).status, 0);
  expect_shared_error({"--model.dim=128"}, "go on with the model and the optimizer that it was saved with, or keep");
  const std::string manifest = path("run/checkpoint/step-1/manifest.json");
  std::filesystem::resize_file(manifest, std::filesystem::file_size(manifest) / 2);
  expect_shared_error({}, "step-1/manifest.json");
}

TEST_F(ProgramTest, MalformedWeightsAreRefused) {
  write("model.safetensors", "this is no safetensors file at all");
  expect_one_error(run({"train", config(), "--checkpoint.initial_load_path", path("model.safetensors"),
                        "--checkpoint.initial_load_in_hf"}),
                   1, "malformed safetensors file");
}

TEST_F(ProgramTest, AMalformedTokenizerIsRefusedBeforeTraining) {
  expect_one_error(run({"train", config(), "--model.hf_assets_path", path("."), "--metrics.sample_prompt", "x"}), 1,
                   "tokenizer.json': [metrics] sample_prompt needs the tokenizer");
  write("tokenizer.json", "{\"model\": 3");
  expect_one_error(run({"train", config(), "--model.hf_assets_path", path("."), "--metrics.sample_prompt", "x"}), 1,
                   "tokenizer.json");
  EXPECT_FALSE(std::filesystem::exists(path("run")));
}

TEST_F(ProgramTest, AFullDiskDuringASaveLeavesTheEarlierCheckpoint) {
  const std::string file = config("[checkpoint]\ninterval = 4\n");
  ASSERT_EQ(run({"train", file, "--training.steps=4"}).status, 0);
  // The file of the model is larger than the limit, the other files of the run are not.
  const Outcome full = run({"train", file, "--metrics.no-enable_tensorboard"}, {.file_size_limit = 100'000});
  expect_one_error(full, 1, "phalanx train: cannot save checkpoint " + path("run/checkpoint/step-8") + ": ");
  EXPECT_THAT(full.err, HasSubstr("(earlier checkpoints are as they were)"));
  EXPECT_TRUE(std::filesystem::exists(path("run/checkpoint/step-4/manifest.json")));
  EXPECT_FALSE(std::filesystem::exists(path("run/checkpoint/step-8")));
  const Outcome again = run({"train", file});
  EXPECT_EQ(again.status, 0) << again.err;
  EXPECT_THAT(again.err, HasSubstr("step-4"));
}

TEST_F(ProgramTest, ACheckpointThatCannotBeGoneOnFromIsOneErrorBeforeTheFirstStep) {
  const std::string file = config();
  ASSERT_EQ(run({"train", "-n", "2", file, "--training.steps=2"}).status, 0);
  ASSERT_EQ(run({"train", "-n", "2", file, "--training.steps=2", "--debug.seed=5", "--job.dump_folder", path("other")})
                .status,
            0);
  const auto expect_refused = [&](const std::vector<std::string>& more, int status, const std::string& text) {
    std::vector<std::string> command = {"train", "-n", "2", file};
    command.insert(command.end(), more.begin(), more.end());
    const Outcome outcome = run(command);
    expect_one_error(outcome, status, text);
    EXPECT_THAT(outcome.err, Not(::testing::ContainsRegex("step: +[0-9]+  loss")));
    EXPECT_EQ(count(contents(path("run/metrics.jsonl")), "\"loss\""), 2);
  };
  const std::string shard = "checkpoint/step-2/shard-00002-model-00001-of-00001.safetensors";
  const std::string whole = contents(path("run/" + shard)), foreign = contents(path("other/" + shard));
  ASSERT_EQ(whole.size(), foreign.size());
  std::filesystem::remove(path("run/" + shard));
  expect_refused({}, 1, shard + ": No such file or directory");
  write("run/" + shard, foreign);
  expect_refused({}, 1, shard + " is damaged: ");
  write("run/" + shard, whole);
  expect_refused({"--model.dim=128"}, 1, "step-2 does not fit this model");
  expect_refused({"--parallelism.tensor_parallel_degree=3"}, 2, "tensor_parallel_degree");
  EXPECT_EQ(run({"train", "-n", "2", file}).status, 0);
}

TEST_F(ProgramTest, AnAsynchronousSaveTellsHowLongItHeldUpTheRun) {
  const Outcome outcome = run({"train", "-n", "2", config("[checkpoint]\ninterval = 4\nasync_mode = \"async\"\n")});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  for (const char* step : {"4", "8"}) {
    EXPECT_THAT(outcome.err, ::testing::ContainsRegex("saving step " + std::string(step) +
                                                      " while training goes on \\(copied in [0-9.]+ [mu]?s\\)"));
  }
}

TEST_F(ProgramTest, APortInUseIsNamed) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(listener, 1), 0);
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  const std::string port = std::to_string(ntohs(address.sin_port));
  const Outcome outcome =
      run({"train", config(), "--comm.init_timeout_seconds=5"}, {.environment = {{"RANK", "0"},
                                                                                 {"WORLD_SIZE", "2"},
                                                                                 {"LOCAL_RANK", "0"},
                                                                                 {"LOCAL_WORLD_SIZE", "2"},
                                                                                 {"MASTER_ADDR", "127.0.0.1"},
                                                                                 {"MASTER_PORT", port}}});
  ::close(listener);
  expect_one_error(outcome, 1, "cannot listen on 127.0.0.1:" + port + ": the port is in use by another program");
}

TEST_F(ProgramTest, LogLinesComeAtTheirStepsWithTheSpeedSinceTheLineBefore) {
  const Outcome outcome = run({"train", "-n", "2", config(), "--metrics.log_freq=3"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  std::vector<nlohmann::json> metrics;
  std::istringstream file(contents(path("run/metrics.jsonl")));
  for (std::string line; std::getline(file, line);) metrics.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(metrics.size(), 8U);
  const std::regex line("step: +([0-9]+)  loss: .*tps: ([0-9,]+)  tflops: ([0-9.]+)  mfu: ([0-9.]+|N/A)");
  std::vector<std::size_t> steps;
  std::size_t before = 0;
  for (std::sregex_iterator at(outcome.err.begin(), outcome.err.end(), line), end; at != end; ++at) {
    const std::size_t step = std::stoul((*at)[1]);
    steps.push_back(step);
    double tokens = 0, seconds = 0;
    for (std::size_t i = before; i < step; ++i) {
      tokens += metrics[i]["tokens"].get<double>();
      seconds += metrics[i]["seconds"].get<double>();
    }
    before = step;
    const double tps = tokens / 2 / seconds;  // of one device
    EXPECT_NEAR(std::stod(std::regex_replace((*at)[2].str(), std::regex(","), "")), tps, 0.51) << step;
    const double flops = metrics[0]["tflops"].get<double>() / metrics[0]["tps"].get<double>();
    EXPECT_NEAR(std::stod((*at)[3]), tps * flops, 0.0051) << step;
    if (step == 1) continue;  // the device's peak is not known yet
    const auto& last = metrics[step - 1];
    const double peak = last["tflops"].get<double>() / last["mfu_percent"].get<double>();
    EXPECT_NEAR(std::stod((*at)[4]), tps * flops / peak, 0.0051) << step;
  }
  EXPECT_THAT(steps, ::testing::ElementsAre(1, 3, 6, 8));
}

TEST_F(ProgramTest, CtrlCSavesAndEndsWithStatus0) {
  const Outcome stopped = run({"train", config(), "--training.steps=100000"}, {.meanwhile = [&](pid_t program) {
                                if (count(contents(path("run/metrics.jsonl")), "\n") < 2) return false;
                                ::kill(program, SIGINT);
                                return true;
                              }});
  EXPECT_EQ(stopped.status, 0) << stopped.err;
  EXPECT_EQ(count(stopped.err, "stopped on request after step"), 1) << stopped.err;
  EXPECT_EQ(count(stopped.err, "saved "), 1) << stopped.err;
}

TEST_F(ProgramTest, AClosedTerminalSavesAndEndsWithStatus0) {
  for (const bool by_launcher : {false, true}) {
    std::vector<std::string> command = {"train", config(), "--training.steps=100000"};
    if (by_launcher) command.insert(command.end(), {"-n", "2"});
    const Outcome closed = run(command, {.streams = RunOptions::Streams::terminal, .hang_up = [&] {
                                           return count(contents(path("run/metrics.jsonl")), "\n") >= 2;
                                         }});
    EXPECT_EQ(closed.status, 0) << closed.out;
    const auto description = nlohmann::json::parse(contents(path("run/run.json")));
    EXPECT_EQ(description["status"], "stopped");
    const std::string step = std::to_string(description["steps_done"].get<int>());
    EXPECT_TRUE(std::filesystem::exists(path("run/checkpoint/step-" + step + "/manifest.json"))) << step;
    std::filesystem::remove_all(path("run"));
  }
}

// On a terminal the bar is drawn by rank 0 alone; whatever else is said clears it first and stands on lines of its own.
TEST_F(ProgramTest, TheScreenOfTwoRanksOnATerminal) {
  const auto on_terminal = [&](const std::vector<std::string>& more, std::function<bool(pid_t)> meanwhile = {}) {
    std::vector<std::string> command = {"train", "-n", "2", config()};
    command.insert(command.end(), more.begin(), more.end());
    return run(command, {.streams = RunOptions::Streams::terminal, .meanwhile = std::move(meanwhile)});
  };
  const std::string clear = "\r\x1b[K";
  const Outcome good = on_terminal({});
  EXPECT_EQ(good.status, 0) << good.out;
  EXPECT_THAT(good.out, HasSubstr("\rtraining   0% ["));
  EXPECT_EQ(count(good.out, clear + "training: 8 steps in "), 1) << good.out;
  EXPECT_THAT(good.out, Not(HasSubstr("\n\r\n")));  // no empty line
  std::istringstream lines(good.out);
  std::map<std::string, int> seen;
  for (std::string line; std::getline(lines, line);) {
    if (const std::size_t at = line.find(" - "); at != std::string::npos) ++seen[line.substr(at)];
  }
  EXPECT_GT(seen.size(), 12U);
  for (const auto& [line, times] : seen) EXPECT_EQ(times, 1) << line;

  const Outcome bad = on_terminal({"--training.steps=100000"}, [&](pid_t) {
    if (count(contents(path("run/metrics.jsonl")), "\n") < 10 || workers_of(path("run.toml")).size() < 2) return false;
    ::kill(workers_of(path("run.toml")).back(), SIGKILL);
    return true;
  });
  EXPECT_EQ(bad.status, 128 + SIGKILL);
  EXPECT_EQ(count(bad.out, clear + "phalanx train: rank "), 1) << bad.out;
}

TEST_F(ProgramTest, UnderNohupAClosedTerminalEndsNothing) {
  const std::vector<std::string> command = {"train", "-n", "2", config(), "--training.steps=30"};
  const Outcome outcome = run(command, {.ignore_hang_up = true, .meanwhile = [&](pid_t launcher) {
                                          if (count(contents(path("run/metrics.jsonl")), "\n") < 2) return false;
                                          ::kill(launcher, SIGHUP);
                                          for (const pid_t rank : workers_of(path("run.toml"))) ::kill(rank, SIGHUP);
                                          return true;
                                        }});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(nlohmann::json::parse(contents(path("run/run.json")))["status"], "finished");
}

TEST_F(ProgramTest, TrainingGoesOnWhenNobodyReadsItsOutput) {
  for (const bool by_launcher : {false, true}) {
    std::vector<std::string> command = {"train", config()};
    if (by_launcher) command.insert(command.end(), {"-n", "2"});
    EXPECT_EQ(run(command, {.streams = RunOptions::Streams::unread}).status, 0);
    EXPECT_TRUE(std::filesystem::exists(path("run/checkpoint/step-8/manifest.json")));
    std::filesystem::remove_all(path("run"));
  }
}

TEST_F(ProgramTest, AKilledRankIsNamedAndAKilledLauncherLeavesNoRankBehind) {
  const std::string file = config();
  const auto ranks = [&] { return workers_of(file); };
  const auto training = [&] { return count(contents(path("run/metrics.jsonl")), "\n") >= 2; };
  const std::vector<std::string> command = {"train", "-n", "2", file, "--training.steps=100000"};
  const Outcome killed_rank = run(command, {.meanwhile = [&](pid_t) {
                                    if (!training() || ranks().size() != 2) return false;
                                    ::kill(ranks()[0], SIGKILL);
                                    return true;
                                  }});
  EXPECT_NE(killed_rank.status, 0);
  EXPECT_EQ(count(killed_rank.err, "was killed by signal 9"), 1) << killed_rank.err;
  EXPECT_EQ(ranks().size(), 0U);

  std::filesystem::remove_all(path("run"));
  const Outcome killed_launcher = run(command, {.meanwhile = [&](pid_t launcher) {
                                        if (!training()) return false;
                                        ::kill(launcher, SIGKILL);
                                        return true;
                                      }});
  EXPECT_EQ(killed_launcher.status, 128 + SIGKILL);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!ranks().empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(ranks().size(), 0U);
  for (const pid_t worker : ranks()) ::kill(worker, SIGKILL);
}

TEST_F(ProgramTest, WithoutSharedMemoryTwoRanksUseGlooOrSaySo) {
  // Shared memory is a file to the system, so a limit on files is one on it.
  const RunOptions without{.file_size_limit = 100'000};
  const Outcome chosen = run({"train", "-n", "2", config(), "--checkpoint.no-enable"}, without);
  EXPECT_EQ(chosen.status, 0) << chosen.err;
  EXPECT_EQ(count(chosen.err, "shared memory cannot be used, so gloo is"), 1) << chosen.err;
  EXPECT_THAT(chosen.err, HasSubstr("backend gloo"));
  expect_one_error(run({"train", "-n", "2", config(), "--checkpoint.no-enable", "--comm.backend=shm"}, without), 1,
                   "shared memory is not available");
}

TEST_F(ProgramTest, WrongOptionsAreNamedWithTheNearest) {
  expect_one_error(run({"generate", "--checkpoint", "x", "--promt", "y"}), 2,
                   "unknown option '--promt' (did you mean '--prompt'?)");
  expect_one_error(run({"generate", "--checkpoint", "x", "--prompt", "y", "z"}), 2, "unexpected argument 'z'");
  expect_one_error(run({"generate", "--checkpoint", "x", "--prompt", "y", "--top-k", "many"}), 2,
                   "--top-k = many: expected a number");
  expect_one_error(run({"generate", "--checkpoint", "x", "--prompt", "y", "--seed", "-1"}), 2, "--seed is -1");
  const Outcome outcome = run({"tokenize", "x", "--vocab-sise", "300"});
  expect_one_error(outcome, 2, "unknown option '--vocab-sise' (did you mean '--vocab-size'?)");
  EXPECT_THAT(outcome.err, HasSubstr("See `phalanx tokenize --help`."));
}

TEST_F(ProgramTest, ARunAndItsExportGenerateTheSame) {
  const std::string file = config();
  ASSERT_EQ(run({"train", file, "--checkpoint.last_save_in_hf", "--model.rope_theta=50", "--model.norm_eps=0.01",
                 "--model.tie_embeddings", "--optimizer.lr=1e-2"})
                .status,
            0);
  write("prompts.jsonl", "{\"ids\": [5, 300, 7]}\n{\"ids\": [1]}\n");
  const auto generate = [&](const std::string& folder) {
    return run({"generate", "--checkpoint", path(folder), "--prompts-file", path("prompts.jsonl"), "--max-new-tokens",
                "12", "--temperature", "0.9"});
  };
  const Outcome of_run = generate("run/checkpoint"), of_export = generate("run/hf");
  ASSERT_EQ(of_run.status, 0) << of_run.err;
  EXPECT_EQ(count(of_run.out, "\"ids\""), 2) << of_run.out;
  EXPECT_EQ(of_run.out, of_export.out) << of_export.err;
  expect_one_error(generate("run"), 1, "did you mean " + path("run/checkpoint") + "?");
  expect_one_error(generate("nothing"), 1, "is not a directory");
}

TEST_F(ProgramTest, ReportOfAFolderWithoutARunIsAnError) {
  expect_one_error(run({"report", path("nothing")}), 1, "run.json");
  EXPECT_EQ(run({"report"}).status, 2);
}

// --- phalanx trace analyze: real ranks get stuck
// ----------------------------------------------------------------------

class TraceAnalyzeTest : public ProgramTest {
 protected:
  TraceAnalyzeTest() { std::filesystem::create_directory(path("traces")); }

  Outcome launch(int ranks, std::vector<std::string> arguments, std::function<bool(pid_t)> meanwhile = {}) const {
    const std::string worker = std::filesystem::path(program()).replace_filename("stuck_worker").string();
    arguments.insert(arguments.begin(), {"launch", "-n", std::to_string(ranks), worker});
    return run(arguments, {.environment = {{"PHALANX_COMM_TRACE_DIR", path("traces")}}, .meanwhile = meanwhile});
  }
  Outcome analyze(const std::string& folder = "traces") const { return run({"trace", "analyze", path(folder)}); }
  std::string trace(const std::string& name) const { return contents(path("traces/" + name)); }

  /// The ranks that this test has started and that handle SIGUSR1 by now: before that it would end them.
  std::map<int, pid_t> listening_ranks() const {
    std::map<int, pid_t> ranks;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      const std::string environment = contents(entry.path() / "environ");
      if (environment.find("PHALANX_COMM_TRACE_DIR=" + path("traces")) == std::string::npos) continue;
      const std::string status = contents(entry.path() / "status");
      const std::size_t caught = status.find("SigCgt:"), rank = environment.find(std::string("\0RANK=", 6));
      if (caught == std::string::npos || rank == std::string::npos) continue;
      const auto signals = std::strtoull(status.c_str() + caught + 7, nullptr, 16);
      if ((signals >> (SIGUSR1 - 1) & 1U) == 0) continue;
      ranks[std::atoi(environment.c_str() + rank + 6)] = static_cast<pid_t>(std::stol(name));
    }
    return ranks;
  }
};

TEST_F(TraceAnalyzeTest, ARankThatNeverComesIsNamedAfterATimeOut) {
  const Outcome stuck = launch(2, {"absent", "1000"});
  EXPECT_EQ(stuck.status, 1);
  EXPECT_THAT(stuck.err, HasSubstr("not arrived: rank 1"));
  const Outcome found = analyze();
  EXPECT_THAT(found.out, ::testing::ContainsRegex("^Rank 0 is at op [0-9]+ of group 'world', all_reduce.float32.8., "
                                                  "sum., which failed after [0-9.]+ s, and rank 1 is missing: its "
                                                  "last there is op [0-9]+"));
  // The launcher's SIGTERM had the rank that never came write its file, too.
  EXPECT_THAT(found.out, HasSubstr("\n  rank 1: SIGTERM\n"));
  EXPECT_EQ(found.status, 0) << found.err;
}

// The one that the other rank does not come to; before it there are another and what makes a group.
bool waits_in_second_all_reduce(const std::string& recorder) {
  if (recorder.empty()) return false;
  const auto written = nlohmann::json::parse(recorder);
  int calls = 0;
  bool waits = false;
  for (const auto& entry : written["groups"][0]["entries"]) {
    if (entry["verb"] != "all_reduce") continue;
    ++calls;
    waits = entry["state"] == "started";
  }
  return calls == 2 && waits;
}

TEST_F(TraceAnalyzeTest, SigUsr1HasTheWaitingAndTheAbsentWriteTheirFiles) {
  launch(2, {"absent"}, [&](pid_t launcher) {
    const std::map<int, pid_t> ranks = listening_ranks();
    if (ranks.size() < 2) return false;
    if (!waits_in_second_all_reduce(trace("rank_0.json"))) {
      ::kill(ranks.at(0), SIGUSR1);
      return false;
    }
    if (trace("rank_1.json").empty()) {
      ::kill(ranks.at(1), SIGUSR1);
      return false;
    }
    ::kill(launcher, SIGINT);
    return true;
  });
  const Outcome found = analyze();
  EXPECT_EQ(found.status, 0) << found.err;
  EXPECT_THAT(found.out,
              ::testing::ContainsRegex("^Rank 0 is at op [0-9]+ of group 'world', all_reduce.float32.8., "
                                       "sum., waiting for .*, and rank 1 is missing: its last there is op "));
  EXPECT_THAT(found.out, HasSubstr("\n  ranks 0, 1: SIGUSR1\n"));
}

TEST_F(TraceAnalyzeTest, DifferentCallsAreLaidSideBySide) {
  EXPECT_EQ(launch(2, {"mismatch"}).status, 1);
  const Outcome found = analyze();
  EXPECT_EQ(found.status, 0) << found.err;
  EXPECT_THAT(found.out, ::testing::ContainsRegex("^The ranks do not call the same operation as op [0-9]+ of group "
                                                  "'world': rank 0 called all_reduce.float32.8., sum.; rank 1 called "
                                                  "all_reduce.float64.8., sum.\\."));
}

TEST_F(TraceAnalyzeTest, TheGroupThatHoldsUpTheOthersIsNamed) {
  EXPECT_EQ(launch(3, {"group", "1500"}).status, 1);
  const Outcome found = analyze();
  EXPECT_EQ(found.status, 0) << found.err;
  EXPECT_THAT(found.out, ::testing::StartsWith("Rank 1 is at op 0 of group 'pair', barrier(), which failed after "));
  EXPECT_THAT(found.out, AllOf(HasSubstr("rank 2 is missing: it has issued nothing in that group"),
                               HasSubstr("\ngroup 'world' of ranks 0 to 2: op ")));
}

TEST_F(TraceAnalyzeTest, NobodyIsStuckAndBadFolders) {
  EXPECT_EQ(launch(2, {"finish"}).status, 0);
  const Outcome fine = analyze();
  EXPECT_EQ(fine.status, 0) << fine.err;
  EXPECT_THAT(fine.out,
              ::testing::StartsWith("Nothing is stuck: all ranks have finished all operations of 1 group.\n"));

  expect_one_error(analyze("nothing"), 1, "nothing does not exist");
  write("traces/rank_1.json", "{");
  expect_one_error(analyze(), 1, "rank_1.json is no flight recorder file");
  EXPECT_EQ(run({"trace"}).status, 2);
  EXPECT_EQ(run({"trace", "analyze"}).status, 2);
  expect_one_error(run({"trace", "analize", path("traces")}), 2, "did you mean 'analyze'?");
}

TEST_F(TraceAnalyzeTest, TrainingWritesOnSigUsr1AndWhenARankDies) {
  const std::string file = config("[comm]\nsave_traces_file_prefix = \"r\"\ntrace_buf_size = 16\n");
  const Outcome outcome = run({"train", "-n", "2", file, "--training.steps=1000000", "--checkpoint.no-enable"},
                              {.environment = {{"PHALANX_COMM_TRACE_DIR", path("traces")}}, .meanwhile = [&](pid_t) {
                                 const std::map<int, pid_t> ranks = listening_ranks();
                                 if (ranks.size() < 2 || count(contents(path("run/metrics.jsonl")), "\n") < 8)
                                   return false;
                                 if (trace("r0.json").empty()) {
                                   ::kill(ranks.at(0), SIGUSR1);
                                   return false;
                                 }
                                 EXPECT_EQ(nlohmann::json::parse(trace("r0.json"))["reason"], "SIGUSR1");
                                 ::kill(ranks.at(1), SIGKILL);
                                 return true;
                               }});
  EXPECT_NE(outcome.status, 0);
  const auto written = nlohmann::json::parse(trace("r0.json"));
  EXPECT_THAT(written["reason"].get<std::string>(), HasSubstr("rank 1 has died"));
  EXPECT_EQ(written["groups"][0]["entries"].size(), 16U);  // of more
  expect_one_error(analyze(), 1, "rank 1 of the job left no file");
}

TEST_F(ProgramTest, ATraceOfTrainingIsWrittenPerRankAndAlsoWhenTheRunIsKilledItIsWholeOrAbsent) {
  const std::string file = config("[profiling]\nenable_profiling = true\nprofile_freq = 2\n");
  run({"train", "-n", "2", file, "--training.steps=1000000", "--checkpoint.no-enable"},
      {.meanwhile = [&](pid_t launcher) {
        if (!std::filesystem::exists(path("run/profile_traces/iteration_6"))) return false;
        ::kill(launcher, SIGKILL);
        return true;
      }});
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path("run/profile_traces"))) {
    if (entry.path().extension() != ".json") continue;
    ++files;
    EXPECT_TRUE(nlohmann::json::accept(contents(entry.path()))) << entry.path();
  }
  EXPECT_GE(files, 4);
  for (const char* rank : {"0", "1"}) {
    EXPECT_TRUE(
        std::filesystem::exists(path(std::string("run/profile_traces/iteration_4/rank") + rank + "_trace.json")));
  }
}

}  // namespace
}  // namespace phalanx::cli
