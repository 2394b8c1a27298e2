// What a run saves, and how another run resumes from it.
#include <ATen/ops/tensor.h>

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/files/branch.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/files/hf_model.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/config/model_config.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/hf_names.h"
#include "phalanx/models/llama.h"
#include "phalanx/train/run_lock.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

class TrainerCheckpointTest : public TrainerTest {};

TEST_F(TrainerCheckpointTest, AResumedRunHasTheSameBitsAsOneThatNeverStopped) {
  for (const int ranks : {1, 2}) {
    const std::string name = std::to_string(ranks);
    const Weights whole = train(config("whole" + name), ranks);
    train(config("parts" + name, {"--training.steps=12", "--checkpoint.interval=5"}), ranks,
          [asked = std::make_shared<std::atomic<int>>(0), ranks](int) { return asked->fetch_add(1) / ranks >= 4; });
    EXPECT_TRUE(result_.stopped);
    EXPECT_EQ(result_.step, 5);
    const Weights parts = train(config("parts" + name), ranks);
    EXPECT_EQ(result_.step, 12);
    EXPECT_EQ(parts, whole);
    EXPECT_EQ(losses("parts" + name), losses("whole" + name));
  }
}

// The backends here sum in rank order, so the bits of a run do not show where a gradient was in its bucket; NCCL's and
// MPI's would. So the order itself is checked: first the order that the trainer saves, then an order that it must
// adopt, because no backward pass would lead to it.
TEST_F(TrainerCheckpointTest, TheBucketOrderIsSavedAndTakenOver) {
  const std::vector<std::string> keys = {"--training.steps=4", "--model.dim=128"};  // two buckets
  const Weights whole = train(config("whole", keys), 2);
  const auto ready_order = bucket_order_of("whole", 4);
  const std::size_t parameters = (ready_order.size() - 2) / 2;
  EXPECT_EQ(parameters, whole.size());
  EXPECT_EQ(ready_order[1], 1);  // rebuilt after the first pass
  EXPECT_EQ(ready_order.back(), 1);
  std::vector<std::int64_t> first_order;  // before that pass
  for (std::size_t i = parameters; i-- > 0;) first_order.push_back(static_cast<std::int64_t>(i));
  const std::vector<std::int64_t> indices(ready_order.begin() + 2, ready_order.end() - static_cast<int>(parameters));
  EXPECT_THAT(indices, ::testing::UnorderedElementsAreArray(first_order));
  EXPECT_NE(indices, first_order);

  train(config("parts", keys), 1, stop_after_first_step());  // one shard has all
  EXPECT_EQ(bucket_order_of("parts", 1), ready_order);
  auto other_order = ready_order;
  std::reverse(other_order.begin() + 2, other_order.end() - static_cast<int>(parameters));
  TrainState state = state_in("parts", 1);
  for (const auto& [name, tensor, shard] : state.tensors) {
    if (name == "layout.ddp.bucket_order") tensor.copy_(at::tensor(other_order));
  }
  const std::string folder = path("parts/checkpoint");
  const std::string metadata = CheckpointReader(folder + "/step-1").manifest().metadata;
  CheckpointManager(folder).save(state, 1, metadata);

  EXPECT_EQ(train(config("parts", keys), 2), whole);
  EXPECT_EQ(result_.step, 4);
  EXPECT_EQ(bucket_order_of("parts", 4), other_order);
}

TEST_F(TrainerCheckpointTest, AnyRanksWishToStopStopsAllAfterTheSameStepAndSaves) {
  train(config("run"), 2, [](int rank) { return rank == 1; });
  EXPECT_TRUE(result_.stopped);
  EXPECT_EQ(result_.step, 1);
  EXPECT_TRUE(std::filesystem::exists(path("run") + "/checkpoint/step-1/manifest.json"));
}

TEST_F(TrainerCheckpointTest, SavesAndValidatesAtItsSteps) {
  const std::vector<std::string> keys = {"--checkpoint.interval=5", "--validation.freq=5"};
  train(config("all", keys), 1);
  EXPECT_THAT(checkpoints_of("all"), ElementsAre("step-10", "step-12", "step-5"));
  EXPECT_THAT(values_of("all", "validation_loss"), SizeIs(3));
  std::vector<int> steps;
  for (const auto& line : lines_with("all", "validation_loss")) steps.push_back(line["step"]);
  EXPECT_THAT(steps, ElementsAre(5, 10, 12));

  train(config("two", {"--checkpoint.interval=5", "--checkpoint.keep_latest_k=2"}), 1);
  EXPECT_THAT(checkpoints_of("two"), ElementsAre("step-10", "step-12"));

  // Back to step 5 although there are later ones.
  train(config("all", {"--checkpoint.load_step=5"}), 1, stop_after_first_step());
  EXPECT_EQ(result_.step, 6);
  EXPECT_THAT(refusal<CheckpointError>(config("all", {"--checkpoint.load_step=7"})),
              AllOf(HasSubstr("load_step is 7"), HasSubstr("complete checkpoints there: 6, 5")));
}

/// Steps of the lines that a training step has written.
std::vector<int> trained_steps(const std::vector<nlohmann::json>& lines) {
  std::vector<int> steps;
  for (const auto& line : lines) steps.push_back(line["step"]);
  return steps;
}

TEST_F(TrainerCheckpointTest, ARollbackBeginsABranchThatWhatComesNextFollows) {
  const auto steps_in = [&](const std::string& folder) {
    std::vector<std::int64_t> steps;
    for (const auto& found : list_checkpoints(path("run/checkpoint") + folder).complete) steps.push_back(found.step);
    return steps;
  };
  const std::vector<std::string> every = {"--checkpoint.interval=4"};
  constexpr int ranks = 2;
  train(config("run", every), ranks);
  const auto losses_before = losses("run");
  const auto back = [&](std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--checkpoint.interval=4", "--checkpoint.load_step=4"});
    train(config("run", more), ranks, stop_after_first_step());
    return result_.step;
  };
  EXPECT_EQ(back(), 5);
  EXPECT_THAT(steps_in(""), ElementsAre(5, 4));
  EXPECT_THAT(steps_in("/abandoned-1"), ElementsAre(12, 8));
  // The curve holds one history; the other one is moved away with its steps.
  EXPECT_THAT(trained_steps(lines_with("run", "loss")), ElementsAre(1, 2, 3, 4, 5));
  EXPECT_EQ(read_file(path("run/checkpoint/abandoned-1/metrics.jsonl")).find("\"step\":12") != std::string::npos, true);
  auto run = nlohmann::json::parse(std::ifstream(path("run/run.json")));
  EXPECT_EQ(run["branches"][0]["step"], 4);
  EXPECT_FALSE(run.contains("validation_loss")) << "it was of step 12";
  // The same command continues the branch; so does one without load_step.
  EXPECT_EQ(back(), 6);
  train(config("run", every), ranks, stop_after_first_step());
  EXPECT_EQ(result_.step, 7);
  // If load_step is given again after that, or with other settings, another branch begins.
  EXPECT_EQ(back(), 5);
  EXPECT_THAT(steps_in("/abandoned-2"), ElementsAre(7, 6, 5));
  EXPECT_EQ(back({"--optimizer.lr=1e-3"}), 5);
  EXPECT_THAT(steps_in("/abandoned-3"), ElementsAre(5));
  // This does not hold for later attempts of a job, even if the file with its settings has changed.
  job_ = {.name = "job 7", .is_restart = false};
  EXPECT_EQ(back(), 5);
  job_.is_restart = true;
  EXPECT_EQ(back({"--optimizer.lr=2e-3"}), 6);
  EXPECT_EQ(back(), 7);
  job_.name = "job 8";
  EXPECT_EQ(back({"--optimizer.lr=2e-3"}), 5);
  job_ = {};
  train(config("run", every), ranks);
  EXPECT_EQ(result_.step, 12);
  EXPECT_EQ(trained_steps(lines_with("run", "loss")).size(), 12u);
  EXPECT_EQ(losses("run").at(3), losses_before.at(3));
}

// Settings that change neither state nor losses make no other branch, nor does the same file under another path.
TEST_F(TrainerCheckpointTest, ABranchIsThatOfTheSettingsThatCount) {
  train(config("run", {"--checkpoint.interval=4", "--training.steps=8"}), 1);
  const auto back = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--checkpoint.interval=4", "--checkpoint.load_step=4"});
    train(config("run", more), 1, stop_after_first_step());
    return result_.step;
  };
  EXPECT_EQ(back({}), 5);
  EXPECT_EQ(back({"--metrics.log_freq=3"}), 6);
  EXPECT_EQ(back({"--checkpoint.async_mode=async"}), 7);
  EXPECT_EQ(back({"--training.dataset_path=" + path("run/../tokens.bin")}), 8);
  EXPECT_EQ(back({"--training.max_norm=3"}), 5);
}

// A step that was set aside is moved back by hand: metrics.jsonl belongs to the branch, the step to the run before it.
TEST_F(TrainerCheckpointTest, AStepThatIsMovedBackBringsItsCurve) {
  train(config("run", {"--checkpoint.interval=2", "--training.steps=6"}), 1);
  const auto before = losses("run");
  train(config("run",
               {"--checkpoint.interval=2", "--training.steps=4", "--checkpoint.load_step=2", "--optimizer.lr=1e-2"}),
        1);
  ASSERT_NE(losses("run").at(3), before.at(3));
  std::filesystem::rename(path("run/checkpoint/abandoned-1/step-6"), path("run/checkpoint/step-6"));
  train(config("run", {"--training.steps=7"}), 1);
  ASSERT_EQ(losses("run").size(), 7u);
  for (std::size_t step = 0; step < 6; ++step) EXPECT_EQ(losses("run")[step], before[step]) << step + 1;
  EXPECT_TRUE(std::filesystem::exists(path("run/earlier-1/metrics.jsonl")));
}

TEST_F(TrainerCheckpointTest, ARollbackThatCannotBeLoadedMovesNothing) {
  train(config("run", {"--checkpoint.interval=4"}), 1);
  EXPECT_THAT(refusal<CheckpointError>(config("run", {"--checkpoint.load_step=4", "--model.dim=128"})),
              HasSubstr("step-4 does not fit this "));
  EXPECT_EQ(list_checkpoints(path("run/checkpoint")).complete.size(), 3u);
  EXPECT_FALSE(std::filesystem::exists(path("run/checkpoint/branch.json")));
}

// begin_branch() was interrupted after branch.json was written.
TEST_F(TrainerCheckpointTest, AnInterruptedRollbackIsCompletedByTheNextCommand) {
  train(config("run", {"--checkpoint.interval=4"}), 1);
  const std::string folder = path("run/checkpoint");
  FaultyFileSystem fs(posix_file_system(), {.fail_at = 8, .kind = Fault::crash});
  EXPECT_THROW(begin_branch(folder, {.step = 4}, fs), SimulatedCrash);
  ASSERT_TRUE(read_branch(folder) && !read_branch(folder)->being_set_aside.empty());
  train(config("run", {"--checkpoint.interval=4"}), 2, stop_after_first_step());
  EXPECT_EQ(result_.step, 5);
  EXPECT_THAT(checkpoints_of("run"), ElementsAre("abandoned-1", "step-4", "step-5"));
}

TEST_F(TrainerCheckpointTest, ASecondRunInTheSameFolderIsRefused) {
  const auto in_use = [&](const std::string& folder) {
    return AllOf(HasSubstr(folder + " is in use by process " + std::to_string(::getpid()) + " on host "),
                 HasSubstr("choose another "));
  };
  train(config("run", {"--training.steps=1"}), 1);
  {
    const FolderLock other(path("run"));
    for (const int ranks : {1, 2}) EXPECT_THAT(refusal<Error>(config("run"), ranks), in_use(path("run")));
    // Uses the other run's checkpoint folder, but its own dump folder.
    EXPECT_THAT(refusal<Error>(config("new", {"--checkpoint.folder=" + path("run/checkpoint")})), in_use(path("run")));
  }
  {
    const FolderLock other(path("shared"));
    EXPECT_THAT(refusal<Error>(config("new", {"--checkpoint.folder=" + path("shared")})), in_use(path("shared")));
  }
  // Under any name: in a folder below, through links, from a run whose own folder links there.
  {
    const FolderLock other(path("run"));
    std::filesystem::create_directory_symlink(path("run/checkpoint"), path("link"));
    for (const char* folder : {"link", "run/checkpoint/a/b", "link/a"}) {
      EXPECT_THAT(refusal<Error>(config("new", {"--checkpoint.folder=" + path(folder)})), in_use(path("run")))
          << folder;
    }
  }
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    const RunLock lock(config("run"), *world, {});
    std::filesystem::create_directory(path("linked"));
    std::filesystem::create_directory_symlink(path("run/checkpoint"), path("linked/checkpoint"));
    EXPECT_THAT(refusal<Error>(config("linked")), in_use(path("run")));
  });
  std::filesystem::create_directory(path("third"));
  for (const char* run : {"x", "y"}) {
    std::filesystem::create_directory(path(run));
    std::filesystem::create_directory_symlink(path("third"), path(run) + std::string("/checkpoint"));
  }
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    const RunLock lock(config("x"), *world, {});
    EXPECT_THAT(refusal<Error>(config("y")), in_use(path("y/checkpoint")));
  });
  // A run that is about to end is waited for.
  auto before = std::make_unique<FolderLock>(path("run"));
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    std::string said;
    const RunLock lock(config("run"), *world,
                       {.lock_timeout = std::chrono::seconds(60), .log_info = [&](const std::string& line) {
                          said = line;
                          before.reset();
                        }});
    EXPECT_THAT(said, AllOf(HasSubstr(path("run") + " is in use by process "), HasSubstr("waiting up to")));
    EXPECT_THAT(refusal<Error>(config("run")), in_use(path("run")));
  });
}

TEST_F(TrainerCheckpointTest, AStoppedRunSaysSoAndKeepsWhatItSaidBefore) {
  train(config("run"), 1, stop_after_first_step());
  const std::string file = path("run") + "/run.json";
  auto run = nlohmann::json::parse(std::ifstream(file));
  EXPECT_EQ(run["status"], "stopped");
  run["note"] = "kept";
  std::ofstream(file) << run.dump();
  train(config("run"), 1);
  run = nlohmann::json::parse(std::ifstream(file));
  EXPECT_EQ(run["status"], "finished");
  EXPECT_EQ(run["note"], "kept");
  // A request that comes with the last step stops nothing.
  train(config("one", {"--training.steps=1"}), 1, stop_after_first_step());
  EXPECT_FALSE(result_.stopped);
}

// The seed orders the data: with another seed the saved position is meaningless.
TEST_F(TrainerCheckpointTest, AnotherSeedOnResumeIsRefusedUnlessAskedFor) {
  train(config("run"), 1, stop_after_first_step());
  EXPECT_THAT(refusal<CheckpointError>(config("run", {"--debug.seed=5"}), 2),
              AllOf(HasSubstr("the data are not those that the checkpoint's run read"), HasSubstr("seed"),
                    HasSubstr("allow_data_mismatch")));
  train(config("run", {"--debug.seed=5", "--checkpoint.allow_data_mismatch"}), 2);
  const auto record = nlohmann::json::parse(std::ifstream(path("run") + "/run.json"));
  EXPECT_THAT(record.at("history").dump(), HasSubstr("they begin at their beginning"));
}

// A state whose moments were saved in 16 bits is refused. On request it is loaded with the same values in 32 bits.
TEST_F(TrainerCheckpointTest, TypesAreConvertedOnRequest) {
  const auto moments_in = [&](const std::string& run, at::ScalarType type) {
    train(config(run), 1, stop_after_first_step());
    TrainState state = state_in(run, 1);
    int changed = 0;
    for (NamedTensor& one : state.tensors) {
      if (one.name.find(".exp_avg") == std::string::npos) continue;
      one.tensor = one.tensor.to(at::kBFloat16).to(type);
      ++changed;
    }
    ASSERT_GT(changed, 0);
    const std::string folder = path(run + "/checkpoint");
    const std::string metadata = CheckpointReader(folder + "/step-1").manifest().metadata;
    CheckpointManager(folder).save(state, 1, metadata);
  };
  moments_in("narrow", at::kBFloat16);
  moments_in("wide", at::kFloat);
  EXPECT_THAT(refusal<CheckpointError>(config("narrow")),
              AllOf(HasSubstr("exp_avg"), HasSubstr("expected F32"), HasSubstr("found BF16"),
                    HasSubstr("convert_dtype = true (in [checkpoint]")));
  const Weights narrow = train(config("narrow", {"--checkpoint.convert_dtype=true"}), 2);
  EXPECT_EQ(result_.step, 12);
  EXPECT_EQ(narrow, train(config("wide"), 2));
}

// 5 steps of 8 sequences, then batches of 16, then of 8 again: each run reads on after what was read.
TEST_F(TrainerCheckpointTest, DataGoOnWhereTheyWereWhenTheGlobalBatchChanges) {
  const auto position_after = [&](std::int64_t step) {
    return CheckpointReader(path("run") + fmt::format("/checkpoint/step-{}", step))
        .manifest()
        .integers.at("data.tokens");
  };
  train(config("run", {"--training.steps=5"}), 1);
  EXPECT_EQ(position_after(5), 32 * 40);
  train(config("run", {"--training.steps=8", "--training.global_batch_size=16"}), 2);
  EXPECT_EQ(position_after(8), 32 * (40 + 3 * 16));
  train(config("run", {"--training.steps=10"}), 1);
  EXPECT_EQ(position_after(10), 32 * (40 + 3 * 16 + 2 * 8));
}

TEST_F(TrainerCheckpointTest, WhatACheckpointAndAnExportSayOfTheModelIsTrue) {
  const std::vector<std::string> keys = {"--model.rope_theta=300",       "--model.norm_eps=0.001",
                                         "--model.tie_embeddings",       "--model.n_kv_heads=1",
                                         "--checkpoint.last_save_in_hf", "--training.steps=1"};
  train(config("run", keys), 1);
  const auto hf = nlohmann::json::parse(std::ifstream(path("run") + "/hf/config.json"));
  const nlohmann::json expected_hf = {
      {"hidden_size", 64},        {"intermediate_size", 176},      {"num_hidden_layers", 2},
      {"num_attention_heads", 4}, {"num_key_value_heads", 1},      {"head_dim", 16},
      {"vocab_size", 512},        {"max_position_embeddings", 32}, {"rope_theta", 300.0},
      {"rms_norm_eps", 0.001},    {"tie_word_embeddings", true},   {"model_type", "llama"}};
  for (const auto& [key, value] : expected_hf.items()) EXPECT_EQ(hf[key], value) << key;
  const auto metadata = CheckpointReader(path("run") + "/checkpoint/step-1").manifest().metadata;
  const auto model = nlohmann::json::parse(metadata)["model"];
  const nlohmann::json expected = {
      {"dim", 64},         {"n_layers", 2},     {"n_heads", 4},        {"n_kv_heads", 1},   {"ffn_hidden", 176},
      {"vocab_size", 512}, {"max_seq_len", 32}, {"rope_theta", 300.0}, {"norm_eps", 0.001}, {"tie_embeddings", true}};
  for (const auto& [key, value] : expected.items()) EXPECT_EQ(model[key], value) << key;
}

TEST_F(TrainerCheckpointTest, WritesWeightsWithHuggingFaceNamesThatStartAnotherRun) {
  const Weights before = train(config("first", {"--checkpoint.last_save_in_hf"}), 1);
  // A run of one step with a learning rate of zero keeps what it loaded.
  const Weights after =
      train(config("second", {"--checkpoint.initial_load_path=" + path("first") + "/hf",
                              "--checkpoint.initial_load_in_hf", "--training.steps=1", "--optimizer.lr=0"}),
            1);
  EXPECT_EQ(before, after);
}

TEST_F(TrainerCheckpointTest, AnExportIsOfTheTypeAndInFilesOfTheSizeAskedFor) {
  train(config("run", {"--checkpoint.last_save_in_hf", "--checkpoint.export_dtype=bfloat16",
                       "--checkpoint.export_file_gb=0.0001", "--training.steps=1"}),
        1);
  const std::string hf = path("run") + "/hf";
  const auto description = nlohmann::json::parse(std::ifstream(hf + "/config.json"));
  EXPECT_EQ(description["torch_dtype"], "bfloat16");
  EXPECT_TRUE(description.at("eos_token_id").is_null());
  const auto index = nlohmann::json::parse(std::ifstream(hf + "/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 2 * config::model_config(config("run")).parameter_count());
  std::set<std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    files.insert(file.get<std::string>());
    const safetensors::File weights(hf + "/" + file.get<std::string>());
    EXPECT_EQ(weights.find(name)->dtype, safetensors::Dtype::bf16) << name;
  }
  EXPECT_GE(files.size(), 2U);
  // A resumed run overwrites it.
  train(config("run", {"--checkpoint.last_save_in_hf", "--training.steps=2"}), 1);
  EXPECT_FALSE(std::filesystem::exists(hf + "/model.safetensors.index.json"));
  EXPECT_TRUE(std::filesystem::exists(hf + "/model.safetensors"));
}

class TrainerFamilyTest : public TrainerCheckpointTest, public ::testing::WithParamInterface<models::LlamaFamily> {};

// A model of another family, in two files, with other tensors that such a file may hold.
TEST_P(TrainerFamilyTest, AHuggingFaceDirectoryIsWhatARunStartsFromAndLeaves) {
  using enum models::LlamaFamily;
  const std::string source = path("model");
  models::LlamaConfig shape = models::llama_flavor("debug");
  shape.family = GetParam();
  if (shape.family == qwen3) shape.own_head_dim = 12;
  if (shape.family == gpt2) shape.n_kv_heads = shape.n_heads;
  if (shape.has_experts()) shape.experts = 3, shape.experts_per_token = 2;
  if (shape.family == smollm3) shape.unrotated_layers = {1};
  if (shape.family == phi3) shape.rotary_dim = 12;
  if (shape.family == gemma3_text) {
    shape.own_head_dim = 12;
    shape.query_scalar = 20;
    shape.sliding_window = 5;
    shape.full_layers = {1};
    shape.window_rope_theta = 100;
  }
  if (shape.family == granite) {
    shape.embedding_multiplier = 3.0;
    shape.attention_multiplier = 0.2;
    shape.logits_scaling = 2.5;
  }
  if (shape.family == gpt_oss) {
    shape.own_head_dim = 12;
    shape.activation_limit = 0.1;
    shape.sliding_window = 5;
    shape.full_layers = {1};
  }
  shape.max_seq_len = 64;
  shape.tie_embeddings = true;
  models::Llama model(shape);
  nn::initialise(model, 9);
  std::filesystem::create_directory(source);
  std::ofstream(source + "/config.json") << models::llama_hf_config(shape, "float32");
  std::ofstream(source + "/tokenizer.json") << "{\"a tokenizer\": 1}";
  std::vector<NamedTensor> files[2];
  nlohmann::json index;
  const auto place = [&](const std::string& name) {
    return name == "again" ? FileTensorView("lm_head.weight") : models::hf_tensor_view(shape, name);
  };
  for (const auto& parameter : nn::named_parameters(model)) {
    const bool is_norm = parameter.name == "norm.weight";
    files[is_norm].push_back(parameter);
    index["weight_map"][place(parameter.name).name] = is_norm ? "b.safetensors" : "a.safetensors";
  }
  files[1].push_back({"again", model.tok_embeddings->weight});
  export_weights(source + "/a.safetensors", files[0], {.key_mapping = place}, posix_file_system());
  export_weights(source + "/b.safetensors", files[1], {.key_mapping = place}, posix_file_system());
  std::ofstream(source + "/model.safetensors.index.json") << index.dump();

  const std::vector<std::string> from_there = {"--model.flavor=hf", "--model.hf_assets_path=" + source,
                                               "--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf",
                                               "--training.steps=1"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), from_there.begin(), from_there.end());
    return more;
  };
  Weights expected;
  for (const auto& parameter : nn::named_parameters(model)) {
    expected[parameter.name] =
        std::string(static_cast<const char*>(parameter.tensor.const_data_ptr()), parameter.tensor.nbytes());
  }
  EXPECT_EQ(train(config("one", with({"--optimizer.lr=0"})), 1), expected);
  // Every layout starts from it: sharded, tensor-parallel, in pipeline stages.
  const std::vector<std::vector<std::string>> layouts = {
      {"--parallelism.data_parallel_shard_degree=2", "--parallelism.tensor_parallel_degree=2"},
      {"--parallelism.pipeline_parallel_degree=2", "--parallelism.data_parallel_shard_degree=2"}};
  train(config("learnt", with({"--optimizer.lr=1e-3"})), 1);
  const auto whole = losses("learnt");
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const std::string run = "layout" + std::to_string(i);
    auto keys = with({"--optimizer.lr=1e-3", "--training.local_batch_size=2"});
    keys.insert(keys.end(), layouts[i].begin(), layouts[i].end());
    train(config(run, keys), 4);
    EXPECT_NEAR(losses(run).at(0), whole.at(0), 1e-5) << run;
  }
  // The run writes such a directory too, of the same shape.
  EXPECT_EQ(models::llama_config_from_hf(read_file(path("one") + "/hf/config.json"), "config.json"), shape);
  EXPECT_EQ(read_file(path("one") + "/hf/tokenizer.json"), "{\"a tokenizer\": 1}");
  SavedState saved(path("one") + "/checkpoint/step-1");
  consolidate_for_hf(saved, path("consolidated"));
  EXPECT_TRUE(std::filesystem::exists(path("consolidated") + "/tokenizer.json"));
  for (const std::string& folder : {path("one") + "/hf", path("consolidated")}) {
    const Weights again = train(
        config("again", {"--model.flavor=hf", "--model.hf_assets_path=" + folder, "--checkpoint.initial_load_in_hf",
                         "--checkpoint.no-enable", "--training.steps=1", "--optimizer.lr=0"}),
        1);
    EXPECT_EQ(again, expected) << folder;
  }
  EXPECT_THAT(refusal<ConfigError>(config("long", with({"--training.seq_len=65"}))),
              AllOf(HasSubstr("seq_len = 65"), HasSubstr("max_position_embeddings 64")));
  EXPECT_THAT(refusal<FileError>(
                  config("none", {"--model.hf_assets_path=" + path("nowhere"), "--checkpoint.initial_load_in_hf"})),
              HasSubstr("[model] hf_assets_path '" + path("nowhere") + "' does not exist"));
}

INSTANTIATE_TEST_SUITE_P(Families, TrainerFamilyTest,
                         ::testing::ValuesIn(sampled(
                             std::vector<models::LlamaFamily>{
                                 models::LlamaFamily::qwen3, models::LlamaFamily::gpt2, models::LlamaFamily::mixtral,
                                 models::LlamaFamily::qwen3_moe, models::LlamaFamily::olmo2,
                                 models::LlamaFamily::smollm3, models::LlamaFamily::phi3,
                                 models::LlamaFamily::gemma3_text, models::LlamaFamily::gpt_oss,
                                 models::LlamaFamily::granite},
                             4)),
                         [](const auto& info) { return models::family_name(info.param); });

TEST_F(TrainerCheckpointTest, ACheckpointFolderStandsForItsNewestStepAsInitialWeights) {
  const Weights before = train(config("first", {"--training.steps=3"}), 1);
  for (const char* place : {"", "/checkpoint", "/checkpoint/step-3"}) {
    const Weights after = train(config("second", {"--checkpoint.initial_load_path=" + path("first") + place,
                                                  "--checkpoint.no-enable", "--training.steps=1", "--optimizer.lr=0"}),
                                1);
    EXPECT_EQ(before, after) << place;
  }
  std::filesystem::create_directories(path("empty/checkpoint"));
  EXPECT_THAT(refusal<CheckpointError>(config("third", {"--checkpoint.initial_load_path=" + path("empty")})),
              HasSubstr(path("empty") + "/checkpoint holds no complete checkpoint"));
}

// The folder is lost after training has begun: the background save fails, long before the next save.
TEST_F(TrainerCheckpointTest, AnAsynchronousSaveThatFailsEndsTheRunInTheNextSteps) {
  for (const int ranks : {1, 2}) {
    const std::string name = "lost" + std::to_string(ranks);
    const auto lost = config(name, {"--training.steps=4000", "--checkpoint.interval=60",
                                    "--checkpoint.async_mode=async", "--validation.no-enable"});
    auto asked = std::make_shared<std::atomic<int>>(0);
    std::string message = "no error";
    try {
      train(lost, ranks, [&, asked](int) {
        const int calls = asked->fetch_add(1);
        if (calls == 10 * ranks) {
          std::filesystem::remove_all(path(name) + "/checkpoint");
          write_file(path(name) + "/checkpoint", "no folder");
        }
        // Until the next save the saving thread has enough time, however busy the node is.
        if (calls > 60 * ranks) std::this_thread::sleep_for(std::chrono::milliseconds(100));
        return false;
      });
    } catch (const CheckpointError& error) {
      message = error.what();
    }
    EXPECT_THAT(message, AllOf(HasSubstr("cannot save checkpoint "), HasSubstr("step-60")));
    EXPECT_GE(losses(name).size(), 60U);
    EXPECT_LT(losses(name).size(), 120U) << "the next save would have told it, too";
  }
}

// The stop request comes when the step is done: in its validation, after its save, or when no step is left.
TEST_F(TrainerCheckpointTest, AWishToStopInAValidationOrASaveIsNotHeardAStepLater) {
  const auto stop_after_the_step = [] {
    return [calls = std::make_shared<std::atomic<int>>(0)](int rank) { return rank == 0 && calls->fetch_add(1) > 0; };
  };
  for (const int ranks : {1, 2}) {
    const std::string name = "validating" + std::to_string(ranks);
    train(config(name, {"--training.steps=6", "--validation.freq=1", "--checkpoint.interval=100"}), ranks,
          stop_after_the_step());
    EXPECT_TRUE(result_.stopped);
    EXPECT_EQ(result_.step, 1);
    EXPECT_EQ(result_.validation_loss, std::nullopt);
    EXPECT_TRUE(std::filesystem::exists(path(name) + "/checkpoint/step-1/manifest.json"));
    EXPECT_THAT(values_of(name, "validation_loss"), IsEmpty());
    train(config(name, {"--training.steps=6", "--validation.freq=1", "--checkpoint.interval=100"}), ranks);
    EXPECT_EQ(result_.step, 6);
    EXPECT_THAT(values_of(name, "validation_loss"), SizeIs(5));

    const std::string saving = "saving" + std::to_string(ranks);
    train(config(saving, {"--training.steps=6", "--validation.no-enable", "--checkpoint.interval=1"}), ranks,
          stop_after_the_step());
    EXPECT_TRUE(result_.stopped);
    EXPECT_EQ(result_.step, 1);
  }
  const std::vector<std::string> keys = {"--training.steps=1", "--checkpoint.last_save_in_hf"};
  train(config("last", keys), 1, stop_after_the_step());
  EXPECT_FALSE(result_.stopped);
  EXPECT_TRUE(result_.asked_to_stop);
  EXPECT_FALSE(std::filesystem::exists(path("last") + "/hf"));
  train(config("last", keys), 1);
  EXPECT_TRUE(std::filesystem::exists(path("last") + "/hf/config.json"));
}

TEST_F(TrainerCheckpointTest, ACheckpointFolderThatCannotBeWrittenToIsToldBeforeTheFirstStep) {
  std::ofstream(path("file")) << "x";
  EXPECT_THAT(refusal<Error>(config("run", {"--checkpoint.folder=" + path("file") + "/checkpoint"})),
              AllOf(HasSubstr(path("file")), HasSubstr("Not a directory")));
  EXPECT_FALSE(std::filesystem::exists(path("run")));
}

}  // namespace
}  // namespace phalanx::train
