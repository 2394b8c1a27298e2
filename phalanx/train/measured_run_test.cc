// Compares the memory of real runs with the prediction for each rank: state, and the peak. The ranks are processes with
// their own counters. scripts/memory_table.py does the same for more layouts.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/config/training_shape.h"
#include "phalanx/plan/memory_model.h"
#include "phalanx/plan/model_partition.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

struct MeasuredCase {
  std::string name;
  int ranks = 2;
  std::vector<std::string> keys = {};
  double hardly_any = 3e5;  // bytes of a category
  double uneven = 0;        // a rank's share more or less of what a step makes, where others have less or more
  bool reshards = false;    // of a stage's parameters, after each pass
  bool is_bound = false;    // activations are at most what is predicted: 16 bits on the CPU, in a model that is cut
};

class MeasuredRunTest : public TrainerTest {
 protected:
  /// Of the stages of a pipeline rank.
  static double stage_parameters(const plan::TrainingShape& shape, std::size_t rank) {
    std::int64_t sum = 0;
    for (const int stage : shape.pipeline->schedule.stages_of(static_cast<int>(rank))) {
      sum += plan::ModelPartition(shape).parameters(shape.pipeline->parts[static_cast<std::size_t>(stage)],
                                                    /*tied=*/false);
    }
    return static_cast<double>(sum);
  }

  void expect_as_predicted(const MeasuredCase& one) {
    SCOPED_TRACE(one.name);
    std::vector<std::string> keys = {"--model.flavor=5M",
                                     "--model.n_layers=3",
                                     "--training.seq_len=128",
                                     "--training.steps=2",
                                     "--training.local_batch_size=4",
                                     "--training.global_batch_size=8",
                                     "--validation.no-enable",
                                     "--checkpoint.no-enable"};
    keys.insert(keys.end(), one.keys.begin(), one.keys.end());
    const config::TrainConfig run = config(one.name, keys);
    TcpStoreServer server;
    ASSERT_EQ(run_forked_ranks(one.ranks,
                               [&](int rank) {
                                 at::set_num_threads(1);
                                 TcpStore store(server.address());
                                 const auto world = make_shm_communicator(store, rank, one.ranks);
                                 Trainer(run, {.world = world, .quiet = true}).run();
                               }),
              "");
    const config::RunPlan plan = config::plan_run(run, one.ranks);
    const plan::TrainingShape shape = config::training_shape(run, plan);
    const auto record = nlohmann::json::parse(std::ifstream(path(one.name) + "/run.json"));
    const auto& measured = record["memory"]["measured"];
    ASSERT_EQ(measured.size(), static_cast<std::size_t>(one.ranks));
    plan::TrainingMemory most;
    double found_of_all = 0, expected_of_all = 0;
    for (std::size_t rank = 0; rank < measured.size(); ++rank) {
      const auto stage_rank = rank / (measured.size() / static_cast<std::size_t>(plan.parallel.pp));
      const plan::TrainingMemory predicted = plan::predict_memory_of_stage_rank(shape, stage_rank);
      const auto bytes = [&](const char* category) { return measured[rank][category].get<double>(); };
      const std::string text = "rank " + std::to_string(rank) + ": measured " + measured[rank].dump() + "\npredicted " +
                               predicted.peak.text();
      using enum observe::MemoryCategory;
      const auto expect_near = [&](double found, double expected, const std::string& what, double uneven = 0) {
        EXPECT_NEAR(found, expected, (0.05 + uneven) * expected + one.hardly_any) << what << ", " << text;
      };
      double found_made = 0, expected_made = 0;
      for (const auto category : {parameters, optimizer, gradients, activations, buffers}) {
        const std::string name(observe::name_of(category));
        const double found = bytes(name.c_str());
        const auto expected = static_cast<double>(predicted.peak[category]);
        // Shards of gradients appear as activations are freed. If two moments have about as much of both, either may be
        // the peak. The same holds in a pipeline with replicas, whose gradients are averaged after the last activation
        // is freed.
        const bool is_made = category == gradients || category == activations;
        if (is_made && (shape.shards > 1 || (shape.pipeline && shape.replicas > 1))) {
          found_made += found;
          expected_made += expected;
        } else if (one.is_bound && category == activations) {
          EXPECT_LE(found, 1.05 * expected) << text;
          EXPECT_GE(found, 0.5 * expected) << text;
        } else {
          expect_near(found, expected, name);
        }
      }
      expect_near(found_made, expected_made, "gradients and activations", one.uneven);
      found_of_all += found_made;
      expected_of_all += expected_made;
      if (shape.pipeline && shape.expert_parallel_size == 1 && shape.shards > 1 && shape.zero_stage > 1 &&
          plan.parallel.pp > 1 && !one.reshards) {
        // Full gradients until the step ends, and full parameters: 4 bytes each of every parameter of the stage.
        expect_near(bytes("buffers"), bytes("parameters"), "gradients between micro-batches, 4 bytes a parameter");
        expect_near(bytes("parameters"), 4.0 * stage_parameters(shape, stage_rank), "4 bytes a parameter");
      }
      const auto total = static_cast<double>(predicted.peak.total());
      EXPECT_LE(bytes("total"), (1.05 + one.uneven / 2) * total) << text;
      if (!one.is_bound) {
        EXPECT_GE(bytes("total"), (0.95 - one.uneven / 2) * total) << text;
      }
      if (predicted.total() > most.total()) most = predicted;
    }
    if (one.uneven > 0) {
      EXPECT_NEAR(found_of_all, expected_of_all,
                  (0.05 + one.uneven / 2) * expected_of_all + one.hardly_any * static_cast<double>(measured.size()));
    }
    EXPECT_EQ(plan::predict_memory(shape).peak.total(), most.peak.total());
    EXPECT_EQ(record["memory"]["predicted"]["total"], most.peak.total());
  }
};

const std::string kTensor = "--parallelism.tensor_parallel_degree=2",
                  kPipeline = "--parallelism.pipeline_parallel_degree=2",
                  kShards = "--parallelism.data_parallel_shard_degree=2";

TEST_F(MeasuredRunTest, CutModelsTakeWhatIsPredicted) {
  const std::vector<MeasuredCase> cases = {
      {.name = "tp", .keys = {kTensor}},
      {.name = "tp_whole_tokens", .keys = {kTensor, "--parallelism.no-enable_sequence_parallel"}},
      {.name = "zero3_tp", .ranks = 4, .keys = {kTensor, kShards}},
      {.name = "pp", .keys = {kPipeline}},
      {.name = "pp_zbv", .keys = {kPipeline, "--parallelism.pipeline_parallel_schedule=ZBV"}},
      {.name = "pp_gpipe_recomputing",
       .keys = {kPipeline, "--parallelism.pipeline_parallel_schedule=GPipe", "--activation_checkpoint.mode=full"}},
      {.name = "pp_ddp", .ranks = 4, .keys = {kPipeline}},
      {.name = "pp_tp", .ranks = 4, .keys = {kPipeline, kTensor}}};
  for (const MeasuredCase& one : sampled(cases, 3)) expect_as_predicted(one);
}

TEST_F(MeasuredRunTest, ShardedStagesTakeWhatIsPredicted) {
  const std::vector<MeasuredCase> cases = {
      {.name = "pp_zero1", .ranks = 4, .keys = {kPipeline, kShards, "--parallelism.zero_stage=1"}},
      {.name = "pp_zero2", .ranks = 4, .keys = {kPipeline, kShards, "--parallelism.zero_stage=2"}},
      {.name = "pp_zero3", .ranks = 4, .keys = {kPipeline, kShards}},
      {.name = "pp_zero3_let_go",
       .ranks = 4,
       .keys = {kPipeline, kShards, "--parallelism.pipeline_parallel_schedule=ZBV",
                "--parallelism.fsdp_reshard_after_forward=always"},
       .reshards = true}};
  for (const MeasuredCase& one : sampled(cases, 3)) expect_as_predicted(one);
}

TEST_F(MeasuredRunTest, StateOf16BitsTakesWhatIsPredicted) {
  const std::vector<std::string> masters = {"--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"};
  std::vector<std::string> narrow = masters;
  narrow.insert(narrow.end(), {"--optimizer.no-master_weights", "--optimizer.state_dtype=bfloat16"});
  const auto with = [](std::vector<std::string> keys, const std::vector<std::string>& more) {
    keys.insert(keys.end(), more.begin(), more.end());
    return keys;
  };
  const std::vector<MeasuredCase> cases = {
      {.name = "narrow_one", .ranks = 1, .keys = with(narrow, {"--training.local_batch_size=8"})},
      {.name = "masters_one", .ranks = 1, .keys = with(masters, {"--training.local_batch_size=8"})},
      {.name = "moments_one", .ranks = 1, .keys = {"--optimizer.state_dtype=bfloat16"}},
      {.name = "narrow_ddp", .keys = narrow},
      {.name = "narrow_zero1", .keys = with(narrow, {kShards, "--parallelism.zero_stage=1"})},
      {.name = "narrow_zero3", .keys = with(narrow, {kShards})},
      {.name = "masters_zero3", .keys = with(masters, {kShards, "--training.mixed_precision_reduce=bfloat16"})},
      {.name = "narrow_tp", .keys = with(narrow, {kTensor}), .is_bound = true},
      {.name = "narrow_pp", .keys = with(narrow, {kPipeline}), .is_bound = true}};
  for (const MeasuredCase& one : sampled(cases, 1)) expect_as_predicted(one);
}

TEST_F(MeasuredRunTest, CutSequencesTakeWhatIsPredicted) {
  const std::string context = "--parallelism.context_parallel_degree=2",
                    heads = "--parallelism.context_parallel_exchange=heads",
                    ring = "--parallelism.context_parallel_exchange=ring", longer = "--training.seq_len=256";
  const std::vector<MeasuredCase> cases = {
      {.name = "cp", .keys = {context, longer}},
      {.name = "cp_heads", .keys = {context, longer, heads}},
      {.name = "cp4_zero3",
       .ranks = 4,
       .keys = {"--parallelism.context_parallel_degree=4", longer, "--parallelism.data_parallel_shard_degree=-1"}},
      {.name = "cp_ring", .keys = {context, longer, ring}},
      {.name = "cp4_ring_recomputing",
       .ranks = 4,
       .keys = {"--parallelism.context_parallel_degree=4", longer, ring, "--activation_checkpoint.mode=full"}},
      {.name = "cp_recomputing", .keys = {context, longer, "--activation_checkpoint.mode=full"}},
      {.name = "cp_tp", .ranks = 4, .keys = {context, longer, kTensor}},
      {.name = "cp_pp", .ranks = 4, .keys = {context, longer, kPipeline}}};
  for (const MeasuredCase& one : sampled(cases, 3)) expect_as_predicted(one);
}

// What other families add to Llama: tied embeddings, whose gradients two stages sum, norms of queries and keys,
// experts.
TEST_F(MeasuredRunTest, OtherFamiliesTakeWhatIsPredicted) {
  const nlohmann::json like_llama = {
      {"hidden_size", 256},       {"num_hidden_layers", 3}, {"num_attention_heads", 4},      {"num_key_value_heads", 2},
      {"intermediate_size", 344}, {"vocab_size", 2048},     {"max_position_embeddings", 128}};
  const std::map<std::string, nlohmann::json> families = {
      {"gpt2", {{"n_embd", 256}, {"n_layer", 3}, {"n_head", 4}, {"n_positions", 128}, {"vocab_size", 2048}}},
      {"mixtral", {{"num_local_experts", 4}}},
      {"qwen3", {{"head_dim", 96}, {"tie_word_embeddings", true}}}};
  for (const auto& [family, numbers] : families) {
    nlohmann::json json = family == "gpt2" ? nlohmann::json::object() : like_llama;
    json.update(numbers);
    json["model_type"] = family;
    std::filesystem::create_directory(path(family));
    write_file(path(family) + "/config.json", json.dump());
    const std::vector<std::string> keys = {"--model.flavor=hf", "--model.hf_assets_path=" + path(family),
                                           "--checkpoint.initial_random_weights"};
    MeasuredCase one{.name = family + "_pp", .keys = keys};
    one.keys.push_back(kPipeline);
    expect_as_predicted(one);
    one = {.name = family + "_zero3_tp", .ranks = 4, .keys = keys};
    one.keys.insert(one.keys.end(), {kTensor, kShards, "--activation_checkpoint.mode=full"});
    expect_as_predicted(one);
  }
}

// Experts that are divided among ranks: whole on each, or shared by two.
TEST_F(MeasuredRunTest, DividedExpertsTakeWhatIsPredicted) {
  const nlohmann::json model = {
      {"model_type", "mixtral"},  {"num_local_experts", 4},   {"hidden_size", 256},
      {"num_hidden_layers", 3},   {"num_attention_heads", 4}, {"num_key_value_heads", 2},
      {"intermediate_size", 344}, {"vocab_size", 2048},       {"max_position_embeddings", 128}};
  std::filesystem::create_directory(path("model"));
  write_file(path("model") + "/config.json", model.dump());
  const auto keys = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--model.flavor=hf", "--model.hf_assets_path=" + path("model"),
                             "--checkpoint.initial_random_weights", "--parallelism.expert_parallel_degree=2"});
    return more;
  };
  const std::string four = "--parallelism.data_parallel_shard_degree=4", two = "--training.local_batch_size=2",
                    twice = "--training.global_batch_size=16", recomputing = "--activation_checkpoint.mode=full";
  const std::vector<MeasuredCase> cases = {
      {.name = "ep", .keys = keys({kShards})},
      {.name = "ep_zero1", .keys = keys({kShards, "--parallelism.zero_stage=1"})},
      {.name = "ep_accumulating", .keys = keys({kShards, two})},
      {.name = "ep_of_4", .ranks = 4, .keys = keys({four, two})},
      {.name = "ep_of_4_zero2", .ranks = 4, .keys = keys({four, two, twice, "--parallelism.zero_stage=2"})},
      {.name = "ep_of_4_recomputing", .ranks = 4, .keys = keys({four, two, twice, recomputing})},
      {.name = "ep_tp", .ranks = 4, .keys = keys({kShards, kTensor, recomputing})},
      {.name = "ep_pp", .ranks = 4, .keys = keys({kShards, kPipeline})}};
  for (MeasuredCase one_case : sampled(cases, 3)) {
    one_case.uneven = 0.1;  // an untrained router sends some ranks more rows
    expect_as_predicted(one_case);
  }
}

// Memory that a run needs to measure the node (the processor's speed, with matrices of 2.3 MiB) is not the run's
// memory.
TEST_F(MeasuredRunTest, OfSmallModelsNothingElseIsCounted) {
  const std::vector<std::string> small = {"--model.flavor=debug", "--model.n_layers=4", "--training.seq_len=64"};
  MeasuredCase one{.name = "debug", .keys = small, .hardly_any = 1e5};
  expect_as_predicted(one);
  // Neither is the memory for comparing replicas.
  one.name = "debug_replica_check";
  one.keys.emplace_back("--debug.replica_check_freq=1");
  expect_as_predicted(one);
  one.name = "debug_zero3";
  one.keys.insert(one.keys.end(), {kShards, "--activation_checkpoint.mode=full"});
  expect_as_predicted(one);
}

}  // namespace
}  // namespace phalanx::train
