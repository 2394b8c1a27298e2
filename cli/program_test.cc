// Runs the real programs like a user, and checks their output, exit status and files.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/version.h"

namespace phalanx::cli {
namespace {

using namespace program_testing;

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
  EXPECT_THAT(outcome.err, ContainsRegex("step:  1  loss:  [0-9]\\.[0-9]{5}  grad_norm: "));
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
  // If this test gets no processor for a while, the ranks finish their steps before the signal. Then try again.
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

// Between processes with shared memory, where the collectives are others than between threads
// (trainer_sharded_test.cc).
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
  EXPECT_THAT(train("2", "heap", {"--comm.shared_heap"}), HasSubstr("large tensors in shared heaps"));
  EXPECT_EQ(losses_of("heap"), losses_of("ddp2"));
  const std::string log = train("2", "zero3-4", {"--training.steps=10"});  // the rows of four ranks, on two ranks
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

// Errors of work that one rank does for all, or that all do alike: one message, and no list of ranks that lost each
// other.
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
  expect_shared_error({"--model.dim=128"}, "set [model] to the saved values, or start a new run in another");
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
  // Only the model's file is larger than the limit, not the other files of the run.
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
    EXPECT_THAT(outcome.err, Not(ContainsRegex("step: +[0-9]+  loss")));
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
    EXPECT_THAT(outcome.err, ContainsRegex("saving step " + std::string(step) +
                                           " while training goes on \\(waited [0-9.]+ [mu]?s\\)"));
  }
}

// Rank 1 runs a copy of the program whose worker reports another version.
TEST_F(ProgramTest, RanksOfAnotherVersionAreRefused) {
  const std::filesystem::path own = std::filesystem::path(program()).parent_path(), other = path("other");
  std::filesystem::create_directory(other);
  std::filesystem::copy_file(own / "phalanx", other / "phalanx");
  std::filesystem::copy_file(own / "phalanx-worker", other / "phalanx-worker");
  std::string worker = contents(other / "phalanx-worker");
  const std::string said(version(), std::strlen(version()) + 1);
  int places = 0;
  for (std::size_t at = worker.find(said); at != std::string::npos; at = worker.find(said, at + 1), ++places) {
    worker[at] = '9';
  }
  ASSERT_GT(places, 0);
  std::ofstream(other / "phalanx-worker", std::ios::binary) << worker;
  write("rank.sh", "if [ $RANK = 1 ]; then exec " + (other / "phalanx").string() + " train " + config() +
                       "; fi\nexec " + program() + " train " + config() + "\n");
  const Outcome outcome = run({"launch", "-n", "2", "sh", path("rank.sh")});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("the ranks do not have the same version of Phalanx: "));
  EXPECT_THAT(outcome.err, HasSubstr("9" + std::string(version()).substr(1) + " on rank 1"));
  EXPECT_THAT(outcome.err, HasSubstr(std::string(version()) + " on rank 0"));
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
    const double tps = tokens / 2 / seconds;  // per device
    EXPECT_NEAR(std::stod(std::regex_replace((*at)[2].str(), std::regex(","), "")), tps, 0.51) << step;
    const double flops = metrics[0]["tflops"].get<double>() / metrics[0]["tps"].get<double>();
    EXPECT_NEAR(std::stod((*at)[3]), tps * flops, 0.0051) << step;
    if (step == 1) continue;  // the peak of the device is not known yet
    const auto& last = metrics[step - 1];
    const double peak = last["tflops"].get<double>() / last["mfu_percent"].get<double>();
    EXPECT_NEAR(std::stod((*at)[4]), tps * flops / peak, 0.0051) << step;
  }
  EXPECT_THAT(steps, ElementsAre(1, 3, 6, 8));
}

// A batch system sends the signal to all processes or to one of them.
TEST_F(ProgramTest, EverySignalOfABatchSystemSavesOnAllRanksThoughItComesToOne) {
  const std::string file = config();
  const auto stop_by = [&](int signal, bool to_launcher, const std::vector<std::string>& more = {}) {
    std::filesystem::remove_all(path("run"));
    std::vector<std::string> command{"train", "-n", "2", file, "--training.steps=100000"};
    command.insert(command.end(), more.begin(), more.end());
    return run(command, {.meanwhile = [&](pid_t launcher) {
                 if (count(contents(path("run/metrics.jsonl")), "\n") < 2) return false;
                 ::kill(to_launcher ? launcher : workers_of(file).back(), signal);
                 return true;
               }});
  };
  const std::pair<int, bool> cases[] = {{SIGUSR1, true}, {SIGUSR2, false}, {SIGXCPU, true}};
  for (const auto& [signal, to_launcher] : cases) {
    const Outcome stopped = stop_by(signal, to_launcher);
    EXPECT_EQ(stopped.status, 0) << signal << "\n" << stopped.err;
    EXPECT_EQ(count(stopped.err, "stopped on request after step"), 1) << signal;
    EXPECT_EQ(count(stopped.err, "saved "), 1) << signal;
  }
  // A signal that is not in the list has its default effect.
  EXPECT_EQ(stop_by(SIGUSR2, false, {"--checkpoint.stop_signals=SIGTERM"}).status, 128 + SIGUSR2);
}

TEST_F(ProgramTest, BeforeTheFirstStepASignalEndsTheRunAtOnceAlsoWhereARankIsStopped) {
  const std::string file = config();
  for (const int signal : {SIGUSR1, SIGTERM}) {
    std::chrono::steady_clock::time_point sent;
    const Outcome ended = run({"train", "-n", "2", file, "--training.steps=100000"}, {.meanwhile = [&](pid_t launcher) {
                                const std::vector<pid_t> ranks = workers_of(file);
                                if (ranks.size() < 2) return false;
                                if (signal == SIGTERM) ::kill(ranks[1], SIGSTOP);
                                ::kill(launcher, signal);
                                sent = std::chrono::steady_clock::now();
                                return true;
                              }});
    EXPECT_EQ(ended.status, 128 + signal) << ended.err;
    EXPECT_LT(std::chrono::steady_clock::now() - sent, std::chrono::seconds(15));  // 5 on a quiet machine
    EXPECT_EQ(workers_of(file).size(), 0U);
  }
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

// On a terminal only rank 0 draws the bar. Other output clears it first and is on separate lines.
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
  // For the system shared memory is a file, so a limit on files also limits it.
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
                   "--top-k is 'many': expected a whole number");
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
  EXPECT_EQ(of_run.out, generate("run").out);  // the run's folder means its newest checkpoint
  expect_one_error(generate("nothing"), 1, "is not a directory");
}

TEST_F(ProgramTest, ReportOfAFolderWithoutARunIsAnError) {
  expect_one_error(run({"report", path("nothing")}), 1, "run.json");
  EXPECT_EQ(run({"report"}).status, 2);
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
