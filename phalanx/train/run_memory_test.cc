// How the trainer uses the prediction and the limits. For real limits of real processes see cli/memory_test.cc.
#include "phalanx/train/run_memory.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/base/memory_limits.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/config/training_shape.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

using RunMemoryTest = TrainerTest;

template <class Body>
void with_memory(const config::TrainConfig& config, int ranks, Body body) {
  run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
    const RunMemory memory(config, config::plan_run(config, world->size()), world, at::kCPU, /*resumes=*/false);
    body(memory, *world);
  });
}

TEST_F(RunMemoryTest, WhatCannotFitIsRefusedOnEveryRankInTheSameWords) {
  // 19 TiB of state: more than any node that runs this test has.
  const auto huge = config("huge", {"--model.flavor=llama3_70b", "--model.n_layers=1500"});
  std::vector<std::string> messages(2);
  with_memory(huge, 2, [&](const RunMemory& memory, Communicator& world) {
    messages[static_cast<std::size_t>(world.rank())] = error_text<MemoryError>([&] { memory.check(); });
  });
  EXPECT_THAT(messages[0], StartsWith("not enough memory: rank "));
  EXPECT_THAT(messages[0], HasSubstr(" are missing\n  limit: "));
  EXPECT_THAT(messages[0], HasSubstr("\n  predicted: "));
  EXPECT_THAT(messages[0], HasSubstr("\n  no layout of 2 ranks, recomputation or smaller batch makes it fit"));
  EXPECT_EQ(messages[1], messages[0]);

  const auto unchecked = config("huge", {"--model.flavor=llama3_70b", "--model.n_layers=1500", "--memory.no-check"});
  with_memory(unchecked, 1, [](const RunMemory& memory, Communicator&) { EXPECT_NO_THROW(memory.check()); });
}

// The limits of containers and batch systems, from files like the kernel's.
TEST_F(RunMemoryTest, WhatACgroupOrTheMachineHasNoRoomForIsRefused) {
  struct Case {
    const char* limit;
    std::map<std::string, std::string> files;
  };
  const Case cases[] = {
      {"cgroup /job (v2): 40.0 MiB, of which 8.00 MiB are in use",
       {{"proc/self/cgroup", "0::/job\n"},
        {"proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"},
        {"sys/fs/cgroup/job/memory.max", "41943040\n"},
        {"sys/fs/cgroup/job/memory.current", "8388608\n"}}},
      {"cgroup /job (v1): 40.0 MiB, of which 8.00 MiB are in use",
       {{"proc/self/cgroup", "9:memory:/job\n"},
        {"proc/self/mountinfo", "35 24 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"},
        {"sys/fs/cgroup/memory/job/memory.limit_in_bytes", "41943040\n"},
        {"sys/fs/cgroup/memory/job/memory.usage_in_bytes", "8388608\n"}}},
      {"memory of this machine: 128 MiB, of which 96.0 MiB are in use",
       {{"proc/meminfo", "MemTotal:  131072 kB\nMemFree:  1 kB\nMemAvailable:  32768 kB\n"}}},
  };
  // 16 bytes for each of 4.2 million parameters, twice where two ranks share the limit.
  const auto run = config("run", {"--model.dim=256", "--model.n_layers=4"});
  for (const Case& one : cases) {
    const TempDirectory root;
    for (const auto& [path, text] : one.files) {
      std::filesystem::create_directories((root.path() / path).parent_path());
      write_file(root.path() / path, text);
    }
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      const RunMemory memory(run, config::plan_run(run, world->size()), world, at::kCPU, /*resumes=*/false,
                             root.path());
      const std::string message = error_text<MemoryError>([&] { memory.check(); });
      EXPECT_THAT(message, AllOf(StartsWith("not enough memory: rank "), HasSubstr(" are missing\n  limit: "),
                                 HasSubstr(one.limit), HasSubstr("\n  predicted: ")));
    });
  }
}

// Of two ranks each has half of the experts, and the memory of the machine is between that and all of them.
TEST_F(RunMemoryTest, ARunThatFitsOnlyAsItsExpertsAreDividedIsNotRefused) {
  const auto run_of = [&](std::int64_t degree) {
    std::vector<std::string> keys = mixture();
    keys.insert(keys.end(), {"--parallelism.data_parallel_shard_degree=2",
                             "--parallelism.expert_parallel_degree=" + std::to_string(degree)});
    return config("run", keys);
  };
  const auto need_of = [](const config::TrainConfig& run) {
    return plan::predict_memory(config::training_shape(run, config::plan_run(run, 2))).total();
  };
  const auto whole = run_of(1), divided = run_of(2);
  ASSERT_LT(need_of(divided), need_of(whole));
  const TempDirectory root;
  std::filesystem::create_directories(root.path() / "proc");
  const std::int64_t kibibytes = (need_of(divided) + need_of(whole)) / 1024;  // for two ranks
  write_file(root.path() / "proc/meminfo", "MemTotal:  " + std::to_string(kibibytes) +
                                               " kB\nMemFree:  1 kB\nMemAvailable:  " + std::to_string(kibibytes) +
                                               " kB\n");
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    const auto check = [&](const config::TrainConfig& run) {
      const RunMemory memory(run, config::plan_run(run, 2), world, at::kCPU, /*resumes=*/false, root.path());
      memory.check();
    };
    EXPECT_NO_THROW(check(divided));
    EXPECT_THAT(error_text<MemoryError>([&] { check(whole); }),
                AllOf(StartsWith("not enough memory: rank "), HasSubstr("parallelism.expert_parallel_degree = 2 (")));
  });
}

TEST_F(RunMemoryTest, ARunThatFitsIsNot) {
  EXPECT_NO_THROW(with_memory(config("run"), 2, [](const RunMemory& memory, Communicator&) { memory.check(); }));
}

TEST_F(RunMemoryTest, AFailedAllocationIsExplained) {
  with_memory(config("run"), 1, [](const RunMemory& memory, Communicator&) {
    const std::string by_libtorch = error_text<MemoryError>(
        [&] { memory.explain_failures([] { at::empty({std::int64_t{1} << 50}, at::kByte); }); });
    EXPECT_THAT(by_libtorch, StartsWith("not enough memory: an allocation failed on rank 0: DefaultCPUAllocator: "));
    EXPECT_THAT(by_libtorch, HasSubstr("\n  limit: memory of this machine: "));
    EXPECT_THAT(by_libtorch, HasSubstr("\n  predicted: "));
    EXPECT_THAT(by_libtorch, ContainsRegex("\n  counted until then: .* of .* predicted\n    parameters .* of "));
    EXPECT_THAT(by_libtorch, HasSubstr("\n  saves most: "));
    EXPECT_THAT(by_libtorch, HasSubstr("\n  it would fit with "));
    EXPECT_THAT(error_text<MemoryError>([&] { memory.explain_failures([] { throw std::bad_alloc(); }); }),
                StartsWith("not enough memory: an allocation failed on rank 0: std::bad_alloc"));
    // An error that was already explained stays as it is. So does an error that is no failed allocation.
    EXPECT_EQ(error_text<MemoryError>([&] { memory.explain_failures([] { throw MemoryError("told already"); }); }),
              "told already");
    EXPECT_THROW(memory.explain_failures([] { throw CommError("rank 3 has died"); }), CommError);
    bool done = false;
    memory.explain_failures([&] { done = true; });
    EXPECT_TRUE(done);
  });
}

TEST_F(RunMemoryTest, FailuresOfMemoryAreToldFromOthers) {
  EXPECT_TRUE(is_memory_failure(std::bad_alloc()));
  EXPECT_TRUE(is_memory_failure(std::system_error(EAGAIN, std::generic_category(), "a thread")));
  EXPECT_TRUE(is_memory_failure(std::system_error(ENOMEM, std::generic_category())));
  EXPECT_TRUE(is_memory_failure(CommError("rank 1: shared memory is not available: 7 bytes cannot be had: No space")));
  EXPECT_TRUE(is_memory_failure(CheckpointError("no memory for a copy of the state (1 GiB): Cannot allocate memory")));
  EXPECT_FALSE(is_memory_failure(std::system_error(ENOENT, std::generic_category())));
  EXPECT_FALSE(is_memory_failure(CommError("rank 1 has died")));
  EXPECT_FALSE(is_memory_failure(std::runtime_error("not this")));
}

TEST_F(RunMemoryTest, TheConfigurationBecomesAShape) {
  const auto shape_of = [&](const std::vector<std::string>& keys, int ranks) {
    const config::TrainConfig one = config("run", keys);
    plan::TrainingShape shape;
    run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
      const auto mine = training_shape(one, config::plan_run(one, ranks), *world, at::kCPU, true);
      if (world->rank() == 0) shape = mine;
    });
    return shape;
  };
  const auto plain = shape_of({}, 2);
  EXPECT_EQ(plain.batch, 4);
  EXPECT_EQ(plain.seq, 32);
  EXPECT_EQ(plain.replicas, 2);
  EXPECT_EQ(plain.shards, 1);
  EXPECT_EQ(plain.optimizer_copies, 2);
  EXPECT_EQ(plain.recompute_every, 0);
  EXPECT_EQ(plain.global_batch, plain.batch * 2);
  EXPECT_EQ(shape_of({"--validation.no-enable"}, 1).validation_batch, 0);
  EXPECT_EQ(shape_of({"--validation.enable", "--validation.local_batch_size=3"}, 1).validation_batch, 3);
  // Pipelines evaluate as many sequences at once as a rank that has the whole model.
  EXPECT_EQ(shape_of({"--validation.enable"}, 2).validation_batch, 4);
  const auto pipelined = shape_of({"--validation.enable", "--parallelism.pipeline_parallel_degree=2"}, 2);
  EXPECT_EQ(pipelined.batch, 1);  // of a micro-batch
  EXPECT_EQ(pipelined.validation_batch, 4);
  // The reference of preferences is computed before the first step.
  const auto beside_preferences = [&](const std::vector<std::string>& keys) {
    config::TrainConfig one = config("run", keys);
    one.dpo.preferences = {"pairs.jsonl"};
    return config::shape_without_layout(one).validation_batch;
  };
  EXPECT_EQ(beside_preferences({"--validation.no-enable"}), -1);
  EXPECT_EQ(beside_preferences({"--validation.enable", "--validation.local_batch_size=3"}), -1);
  EXPECT_EQ(beside_preferences({"--validation.enable", "--validation.local_batch_size=5"}), 5);
  EXPECT_TRUE(plain.resumes);
  EXPECT_FALSE(plain.accumulates || plain.shares_memory || plain.autocast || plain.async_checkpoint || plain.on_device);
  EXPECT_TRUE(shape_of({}, 1).accumulates);
  const auto other = shape_of({"--parallelism.data_parallel_shard_degree=2", "--parallelism.zero_stage=2",
                               "--optimizer.name=SGD", "--optimizer.momentum=0.9", "--activation_checkpoint.mode=full",
                               "--checkpoint.async_mode=async", "--checkpoint.last_save_in_hf"},
                              2);
  EXPECT_EQ(other.shards, 2);
  EXPECT_EQ(other.zero_stage, 2);
  EXPECT_EQ(other.optimizer_copies, 1);
  EXPECT_EQ(other.recompute_every, 1);
  EXPECT_TRUE(other.async_checkpoint && other.exports_at_end);
  EXPECT_TRUE(shape_of({"--training.mixed_precision_param=bfloat16"}, 1).autocast);
  EXPECT_EQ(shape_of({"--training.mixed_precision_param=bfloat16", "--parallelism.data_parallel_shard_degree=2"}, 2)
                .gather_bytes,
            2);
}

TEST_F(RunMemoryTest, CardsAreToldApartWhateverARankSees) {
  const auto cuda = [](int index) { return c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index)); };
  EXPECT_NE(card_name(cuda(0), "2"), card_name(cuda(0), "3"));
  EXPECT_EQ(card_name(cuda(0), "2"), card_name(cuda(1), "0,2,3"));
  EXPECT_EQ(card_name(cuda(0), "2"), card_name(cuda(2), ""));
  EXPECT_NE(card_name(cuda(0), ""), card_name(cuda(1), ""));
  EXPECT_NE(card_name(cuda(0), "GPU-1a,GPU-2b"), card_name(cuda(1), "GPU-1a,GPU-2b"));
}

TEST_F(RunMemoryTest, ARunTellsWhatItTook) {
  const config::TrainConfig run = config("run", {"--training.steps=3", "--parallelism.data_parallel_shard_degree=2"});
  // Processes, because two threads are counted together: their peaks coincide or not, depending on how busy the cores
  // are.
  TcpStoreServer server;
  ASSERT_EQ(run_forked_ranks(2,
                             [&](int rank) {
                               at::set_num_threads(1);
                               TcpStore store(server.address());
                               Trainer(run, {.world = make_shm_communicator(store, rank, 2), .quiet = true}).run();
                             }),
            "");
  const auto record = nlohmann::json::parse(std::ifstream(path("run") + "/run.json"));
  const auto& memory = record["memory"];
  ASSERT_EQ(memory["measured"].size(), 2U);
  for (const auto& rank : memory["measured"]) {
    const auto expect_near = [&](const std::vector<const char*>& categories) {
      double found = 0, predicted = 0;
      for (const char* category : categories) {
        found += rank[category].get<double>();
        predicted += memory["predicted"][category].get<double>();
      }
      EXPECT_NEAR(found, predicted, 0.05 * predicted + 20'000) << categories[0] << ", " << rank.dump();
    };
    for (const char* category : {"parameters", "optimizer", "buffers"}) expect_near({category});
    // Shards of gradients appear as activations are freed. If two moments have about as much of both, either may be the
    // peak.
    expect_near({"gradients", "activations"});
    EXPECT_GT(rank["pss"].get<std::int64_t>(), rank["total"].get<std::int64_t>());
  }
  EXPECT_EQ(record["pss_mib"].size(), 2U);
  EXPECT_EQ(record["peak_rss_mib"].size(), 2U);
}

TEST_F(RunMemoryTest, ACutModelThatCannotFitIsRefused) {
  for (const char* rest : {"--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=2"}) {
    const auto huge =
        config("huge", {"--model.flavor=llama3_70b", "--model.n_layers=1500",
                        "--parallelism.pipeline_parallel_degree=2", rest, "--training.local_batch_size=8",
                        "--training.global_batch_size=16", "--parallelism.pipeline_parallel_microbatch_size=4"});
    with_memory(huge, 4, [&](const RunMemory& memory, Communicator&) {
      EXPECT_THAT(error_text<MemoryError>([&] { memory.check(); }), HasSubstr("\n  predicted: ")) << rest;
    });
  }
}

}  // namespace
}  // namespace phalanx::train
