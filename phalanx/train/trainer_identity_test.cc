// State that belongs to something else: other settings on other ranks, another model, another optimizer.
#include <fmt/format.h>
#include <sched.h>

#include <cerrno>
#include <cstring>
#include <sstream>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/files/rewrite.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/comm/testing/texts_of_ranks.h"
#include "phalanx/data/testing/small_data.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

class TrainerIdentityTest : public TrainerTest {
 protected:
  config::TrainConfig small(const std::string& run, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> keys = {"--training.steps=2", "--validation.no-enable"};
    keys.insert(keys.end(), more.begin(), more.end());
    return config(run, keys);
  }

  /// The error of each rank, where only rank 1 has an extra key.
  std::vector<std::string> told_with(const std::string& key, int ranks = 2) {
    return texts_of_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
      return error_text<ConfigError>([&] {
        const std::vector<std::string> own = world->rank() == 1 ? std::vector{key} : std::vector<std::string>();
        Trainer trainer(small("ranks", own), {.world = world, .quiet = true});
        trainer.run();
      });
    });
  }

  /// The log of a run on one rank.
  std::string log_of(const config::TrainConfig& config) {
    ::testing::internal::CaptureStderr();
    run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
      Trainer trainer(config, {.world = world});
      trainer.run();
    });
    return ::testing::internal::GetCapturedStderr();
  }

  nlohmann::json run_json(const std::string& run) const {
    return nlohmann::json::parse(std::ifstream(path(run) + "/run.json"));
  }

  std::map<std::string, std::string> files_of(const std::string& run) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path(run))) {
      if (!entry.is_regular_file() || entry.path().filename() == kFolderLockName) continue;
      files[entry.path().string()] = read_file(entry.path());
    }
    return files;
  }

  /// A Hugging Face directory with the weights of a run, whose config.json says something else.
  std::string hugging_face_model(const std::function<void(nlohmann::json&)>& change = {}) {
    if (!std::filesystem::exists(path("source"))) {
      train(small("source", {"--training.steps=1", "--checkpoint.last_save_in_hf"}), 1);
    }
    const std::string folder = path(fmt::format("hf{}", made_++));
    std::filesystem::copy(path("source") + "/hf", folder);
    auto config = nlohmann::json::parse(std::ifstream(folder + "/config.json"));
    if (change) change(config);
    std::ofstream(folder + "/config.json") << config.dump();
    return folder;
  }

 private:
  int made_ = 0;
};

TEST_F(TrainerIdentityTest, RanksWithOtherSettingsAreToldBeforeTheFirstStep) {
  for (const auto& [flag, line] : std::vector<std::pair<std::string, std::string>>{
           {"--optimizer.lr=0.5", "optimizer.lr: 0.003 on rank 0; 0.5 on rank 1"},
           {"--debug.seed=9", "debug.seed: 0 on rank 0; 9 on rank 1"},
           {"--training.max_norm=3", "training.max_norm: 1.0 on rank 0; 3.0 on rank 1"},
           {"--training.global_batch_size=16", "training.global_batch_size: 8 on rank 0; 16 on rank 1"},
           {"--parallelism.data_parallel_shard_degree=2", "parallelism.data_parallel_shard_degree: 1 on rank 0"},
           {"--model.rope_theta=99", "model.rope_theta"}}) {
    for (const std::string& message : told_with(flag)) {
      EXPECT_THAT(message, AllOf(HasSubstr("the ranks do not have the same configuration"), HasSubstr(line))) << flag;
    }
    EXPECT_FALSE(std::filesystem::exists(path("ranks"))) << flag;
  }
  for (const std::string& message : told_with("--comm.save_traces_folder=ones_of_rank_1")) {
    EXPECT_EQ(message, "");
  }
}

// Two copies of a model, one of them with other weights: their config.json is the same.
TEST_F(TrainerIdentityTest, RanksWithOtherInitialWeightsAreToldBeforeTheFirstStep) {
  const std::string one = hugging_face_model();
  train(small("other", {"--debug.seed=5", "--training.steps=1", "--checkpoint.last_save_in_hf"}), 1);
  const std::string other = path("other") + "/hf";
  // When sharded or cut in stages, no two ranks hold the same part: the source files themselves are compared.
  for (const char* degree : {"replicate", "shard"}) {
    for (const std::string pipeline : {"1", "2"}) {
      if (pipeline == "2" && std::string(degree) == "shard") continue;
      const auto messages = texts_of_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
        return error_text([&] {
          std::vector<std::string> keys = {"--checkpoint.initial_load_in_hf",
                                           "--parallelism.pipeline_parallel_degree=" + pipeline,
                                           "--checkpoint.initial_load_path=" + (world->rank() == 1 ? other : one)};
          if (pipeline == "1") keys.push_back(fmt::format("--parallelism.data_parallel_{}_degree=2", degree));
          Trainer trainer(small("ranks", keys), {.world = world, .quiet = true});
        });
      });
      for (const std::string& message : messages) {
        EXPECT_THAT(message, AllOf(HasSubstr("the ranks do not have the same initial weights"),
                                   ContainsRegex("hash: \"[0-9a-f]+\" on rank 0; \"[0-9a-f]+\" on rank 1"),
                                   HasSubstr("give every rank the same files")))
            << degree << ", pipeline " << pipeline;
      }
    }
  }
}

/// Ranks of several nodes that do not share the run's folder: rank 1 has its own working directory.
class UnsharedFolderTest : public TrainerIdentityTest {
 protected:
  /// The errors of a run whose folder is "run" below the working directory; that of rank 1 is `other`.
  std::string told(const std::string& other, const std::vector<std::string>& more = {}) {
    const auto home = std::filesystem::current_path();
    std::filesystem::create_directories(path(other));
    std::filesystem::create_directories(path("first"));
    const auto messages = texts_of_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      // From now on this thread has its own working directory.
      EXPECT_EQ(::unshare(CLONE_FS), 0) << std::strerror(errno);
      std::filesystem::current_path(path(world->rank() == 1 ? other : "first"));
      std::vector<std::string> keys = {"--job.dump_folder=run", "--training.local_batch_size=4"};
      keys.insert(keys.end(), more.begin(), more.end());
      const std::string message = error_text<CheckpointError>([&] {
        Trainer trainer(small("run", keys), {.world = world, .quiet = true});
        trainer.run();
      });
      std::filesystem::current_path(home);
      return message;
    });
    EXPECT_EQ(messages[0], messages[1]);
    return messages[0];
  }
};

TEST_F(UnsharedFolderTest, IsToldBeforeTheFirstStep) {
  EXPECT_EQ(told("first", {"--training.steps=1"}), "");
  std::filesystem::remove_all(path("first"));
  EXPECT_THAT(told("second"), AllOf(HasSubstr("rank 1"), HasSubstr("what rank 0 writes there is not seen by this rank"),
                                    HasSubstr("expected one folder for all ranks")));
  EXPECT_FALSE(std::filesystem::exists(path("first/run/metrics.jsonl")));
  EXPECT_EQ(told("third", {"--checkpoint.no-enable"}), "");  // only rank 0 writes
}

TEST_F(UnsharedFolderTest, OtherCheckpointsOnAnotherMachineAreNotGoneOnFrom) {
  ASSERT_EQ(told("first", {"--training.steps=1"}), "");
  std::filesystem::copy(path("first"), path("second"), std::filesystem::copy_options::recursive);
  // Only rank 1 has checkpoints: rank 0 would begin anew.
  std::filesystem::remove_all(path("first"));
  EXPECT_THAT(told("second"), HasSubstr("rank 1: run/checkpoint: what rank 0 writes there is not seen by this rank"));
  // Both have checkpoints, of other runs.
  ASSERT_EQ(told("first", {"--training.steps=1", "--optimizer.lr=1e-4"}), "");
  EXPECT_THAT(
      told("second", {"--parallelism.data_parallel_shard_degree=2"}),
      AllOf(HasSubstr("what rank 0 writes there is not seen by this rank"), HasSubstr("one folder for all ranks")));
}

TEST_F(TrainerIdentityTest, ATokenizerThatAResumeDoesNotNameStaysTheModels) {
  for (const char* name : {"a", "b"}) {
    data::TokenFileWriter writer(path(name), {.vocab_size = 512, .tokenizer = std::string("tok1:") + name});
    writer.add_document(std::vector<std::int32_t>(tokens_.begin(), tokens_.end()));
    writer.finish();
  }
  const auto with = [&](const std::string& data, int steps) {
    return small("run", {"--training.dataset_path=" + path(data), fmt::format("--training.steps={}", steps),
                         "--checkpoint.allow_data_mismatch"});
  };
  train(with("a", 1), 1);
  EXPECT_THAT(log_of(with("tokens.bin", 2)), HasSubstr("nothing to compare of tokenizer"));
  EXPECT_THAT(refusal<CheckpointError>(with("b", 3)),
              AllOf(HasSubstr("tok1:a"), HasSubstr("tok1:b"), HasSubstr("allow_tokenizer_mismatch")));
  EXPECT_THAT(log_of(with("a", 3)), Not(HasSubstr("nothing to compare")));
}

TEST_F(TrainerIdentityTest, AChangedSettingWithoutEffectIsSaidToHaveNone) {
  const std::vector<std::string> first = {"--training.mixed_precision_param=float16", "--training.steps=1"};
  train(small("run", first), 1);
  EXPECT_THAT(
      log_of(small("run", {"--training.mixed_precision_param=float16", "--training.initial_loss_scale=1024",
                           "--optimizer.momentum=0.5"})),
      AllOf(HasSubstr("[training] initial_loss_scale: saved 65536.0, now 1024.0: a new run alone begins with it; "
                      "this one goes on with the saved scale"),
            HasSubstr("momentum: saved 0.0, now 0.5: without effect in these runs")));
  train(small("plain", {"--training.steps=1"}), 1);
  EXPECT_THAT(log_of(small("plain", {"--training.initial_loss_scale=1024"})),
              HasSubstr("loss_scale: saved 65536.0, now 1024.0: without effect in these runs"));
}

TEST_F(TrainerIdentityTest, OtherGroupsOfTheOptimizerAreSaid) {
  train(small("run"), 1);
  const std::string log =
      log_of(small("run", {"--training.steps=3", R"(--optimizer.groups=[{params = ["*norm*"], lr_factor = 2}])"}));
  EXPECT_THAT(log, HasSubstr("changed since step 2: [optimizer] groups: saved [], now "
                             "[{\"lr_factor\":2.0,\"params\":[\"*norm*\"]}]"));
}

TEST_F(TrainerIdentityTest, ChangedSettingsAreSaidAndKept) {
  train(small("run"), 1);
  EXPECT_FALSE(run_json("run").contains("history"));
  const std::string log = log_of(small(
      "run", {"--training.steps=3", "--optimizer.lr=1e-3", "--optimizer.beta2=0.9", "--lr_scheduler.warmup_steps=1",
              "--training.max_norm=2", "--training.mixed_precision_param=bfloat16"}));
  for (const char* line :
       {"changed since step 2: [optimizer] lr: saved 0.003, now 0.001", "[optimizer] beta2: saved 0.95, now 0.9",
        "[training] steps: saved 2, now 3", "[lr_scheduler] warmup_steps: saved 2, now 1",
        "[training] max_norm: saved 1.0, now 2.0", "mixed_precision_param: saved \"float32\", now \"bfloat16\""}) {
    EXPECT_THAT(log, HasSubstr(line));
  }
  auto history = run_json("run")["history"];
  ASSERT_THAT(history, SizeIs(1));
  EXPECT_EQ(history[0]["step"], 2);
  EXPECT_THAT(history[0]["changes"], SizeIs(6));
  EXPECT_THAT(history[0]["from"].get<std::string>(), HasSubstr("step-2"));

  // The next resumed run compares with what was saved last.
  EXPECT_THAT(log_of(small("run", {"--training.steps=4", "--optimizer.lr=1e-3", "--optimizer.beta2=0.9",
                                   "--lr_scheduler.warmup_steps=1", "--training.max_norm=2",
                                   "--training.mixed_precision_param=bfloat16"})),
              AllOf(HasSubstr("changed since step 3: [training] steps: saved 3, now 4"), Not(HasSubstr("beta2: saved")),
                    Not(HasSubstr("nothing to compare"))));
  history = run_json("run")["history"];
  ASSERT_THAT(history, SizeIs(2));
  EXPECT_THAT(history[1]["changes"], SizeIs(1));
}

TEST_F(TrainerIdentityTest, EachStartKeepsItsLayoutAndTime) {
  train(small("run"), 2);
  const auto begun = run_json("run")["begun"];
  EXPECT_EQ(begun["layout"], run_json("run")["layout"]);
  EXPECT_THAT(begun["layout"].get<std::string>(), HasSubstr("2 ranks"));
  train(small("run", {"--training.steps=3"}), 1);
  const auto run = run_json("run");
  EXPECT_EQ(run["begun"], begun);
  ASSERT_THAT(run["history"], SizeIs(1));
  EXPECT_EQ(run["history"][0]["layout"], "1 rank");
  EXPECT_GT(run["history"][0]["time"].get<double>(), begun["time"].get<double>());
}

TEST_F(TrainerIdentityTest, AnotherModelIsRefusedOnResumeAndNothingIsTouched) {
  for (const int ranks : {1, 2}) {
    const std::string run = "run" + std::to_string(ranks);
    train(small(run), ranks);
    const auto before = files_of(run);
    for (const auto& [flag, text] : std::vector<std::pair<std::string, std::string>>{
             {"--model.n_heads=8", "model n_heads: saved 4, now 8"},
             {"--model.rope_theta=500000", "model rope.theta: saved 10000.0, now 500000.0"},
             {"--model.norm_eps=1e-6", "model norm_eps: saved 1e-05, now 1e-06"},
             {"--model.tie_embeddings", "model tie_embeddings: saved false, now true"}}) {
      if (ranks > 1 && flag != "--model.n_heads=8") continue;
      const std::string message = refusal<CheckpointError>(small(run, {flag, "--training.steps=3"}), ranks);
      EXPECT_THAT(message, AllOf(HasSubstr("step-2 does not fit this model"), HasSubstr(text))) << flag;
    }
    EXPECT_EQ(files_of(run), before);
  }
  EXPECT_THAT(
      log_of(small("run1", {"--model.rope_theta=500000", "--training.steps=3", "--checkpoint.allow_model_mismatch"})),
      HasSubstr("changed since step 2: model rope.theta: saved 10000.0, now 500000.0: loaded all the same"));
  EXPECT_THAT(run_json("run1")["history"][0]["changes"].dump(), HasSubstr("rope.theta"));
}

TEST_F(TrainerIdentityTest, ARunInTheFolderOfAnotherKeepsItsCurve) {
  const auto steps = [&](const std::string& folder) {
    std::vector<std::int64_t> found;
    std::istringstream lines(read_file(path(folder) + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      found.push_back(nlohmann::json::parse(line).at("step").get<std::int64_t>());
    }
    return found;
  };
  train(small("run", {"--training.steps=3"}), 1);
  const std::vector<std::string> other = {"--training.steps=2", "--optimizer.lr=0", "--checkpoint.no-enable"};
  EXPECT_THAT(log_of(small("run", other)), HasSubstr("were of another run, and are kept in " + path("run/earlier-1")));
  EXPECT_THAT(steps("run/earlier-1"), ElementsAre(1, 2, 3));
  EXPECT_THAT(steps("run"), ElementsAre(1, 2));
  EXPECT_THAT(log_of(small("run", other)), Not(HasSubstr("of another run"))) << "the same command is the same run";
  // The first run continues, without a line of the other run.
  const auto longer = small("run", {"--training.steps=5"});
  EXPECT_THAT(log_of(longer),
              AllOf(HasSubstr("kept in " + path("run/earlier-2")), HasSubstr("back from " + path("run/earlier-1"))));
  EXPECT_THAT(steps("run"), ElementsAre(1, 2, 3, 4, 5));
  EXPECT_THAT(log_of(small("run", {"--training.steps=6"})), Not(HasSubstr("of another run")));
  EXPECT_THAT(steps("run"), ElementsAre(1, 2, 3, 4, 5, 6));
}

TEST_F(TrainerIdentityTest, AnotherOptimizersStateIsRefused) {
  train(small("run"), 1);
  EXPECT_THAT(refusal<CheckpointError>(small("run", {"--optimizer.name=SGD", "--optimizer.momentum=0.9"})),
              HasSubstr("[optimizer] name: saved \"AdamW\", now \"SGD\""));
}

TEST_F(TrainerIdentityTest, ACheckpointWithoutTheDocumentLoadsAndOneLineSaysSo) {
  train(small("run"), 1);
  const std::string folder = path("run/checkpoint");
  auto metadata = nlohmann::json::parse(CheckpointReader(folder + "/step-2").manifest().metadata);
  metadata.erase("run");
  CheckpointManager(folder).save(state_in("run", 2), 2, metadata.dump());
  const std::string log = log_of(small("run", {"--training.steps=3", "--optimizer.lr=1e-3"}));
  EXPECT_THAT(log, AllOf(HasSubstr("nothing to compare of"), HasSubstr("settings"), Not(HasSubstr("changed since")),
                         HasSubstr("; of its data it goes on after"), Not(HasSubstr("could not be compared"))));
  EXPECT_EQ(run_json("run")["steps_done"], 3);
  // Its model is still compared.
  CheckpointManager(folder).save(state_in("run", 2), 4, metadata.dump());
  EXPECT_THAT(refusal<CheckpointError>(small("run", {"--model.norm_eps=1e-6", "--training.steps=5"})),
              HasSubstr("norm_eps"));
}

TEST_F(TrainerIdentityTest, WeightsOfAnotherModelThanConfigJsonSaysAreRefused) {
  const std::string same = hugging_face_model();
  const std::string other = hugging_face_model([](nlohmann::json& config) {
    config["rope_theta"] = 500000.0;
    config["rms_norm_eps"] = 1e-6;
    config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
  });
  const auto from = [&](const std::string& folder, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--checkpoint.initial_load_in_hf", "--checkpoint.no-enable"});
    more.push_back("--checkpoint.initial_load_path=" + folder);
    return small("tuned", more);
  };
  EXPECT_EQ(refusal<CheckpointError>(from(same)), "");
  EXPECT_THAT(refusal<CheckpointError>(from(other)),
              AllOf(HasSubstr(other + "/config.json"), HasSubstr("rope.theta: the weights were saved with 500000.0"),
                    HasSubstr("norm_eps"), HasSubstr("rope.scaling"), HasSubstr("allow_model_mismatch")));
  EXPECT_THAT(log_of(from(other, {"--checkpoint.allow_model_mismatch"})),
              AllOf(HasSubstr("although"), HasSubstr("rope.theta: 500000.0, and this model 10000.0")));
  // A key that differs from the directory is another model too.
  EXPECT_THAT(refusal<CheckpointError>(from(same, {"--model.norm_eps=1e-3"})), HasSubstr("norm_eps"));
  EXPECT_THAT(refusal<CheckpointError>(small("tuned", {"--checkpoint.initial_load_path=" + same})),
              HasSubstr("is a Hugging Face directory, for it has config.json: initial_load_in_hf = true loads it"));
  // A single file of that directory is of the same model.
  EXPECT_THAT(refusal<CheckpointError>(from(other + "/model.safetensors")), HasSubstr("rope.theta"));
  // Without config.json the header of Phalanx's export still describes it.
  std::filesystem::remove(other + "/config.json");
  EXPECT_THAT(refusal<CheckpointError>(from(other, {"--model.norm_eps=1e-3"})), HasSubstr("model.safetensors:"));
}

TEST_F(TrainerIdentityTest, WeightsOfAnotherRunsModelAreRefused) {
  train(small("first"), 1);
  SavedState saved(path("first") + "/checkpoint/step-2");
  consolidate(saved, path("weights.safetensors"));
  consolidate(saved, path("weights"), {.max_file_bytes = 100'000});
  for (const std::string& place : {path("first") + "/checkpoint", path("first") + "/checkpoint/step-2",
                                   path("weights.safetensors"), path("weights")}) {
    const auto from = [&](std::vector<std::string> more) {
      more.insert(more.end(), {"--checkpoint.initial_load_path=" + place, "--checkpoint.no-enable"});
      return small("second", more);
    };
    EXPECT_THAT(log_of(from({})), Not(HasSubstr("could not be compared with [model]"))) << place;
    const std::string other = "--model.rope_theta=500000";
    EXPECT_THAT(refusal<CheckpointError>(from({other})), HasSubstr("rope.theta")) << place;
    EXPECT_THAT(log_of(from({other, "--checkpoint.allow_model_mismatch"})), HasSubstr("rope.theta: 10000.0"));
    EXPECT_THAT(log_of(from({"--training.seq_len=64"})), HasSubstr("sequences up to 32"));
  }
}

TEST_F(TrainerIdentityTest, AnExportSaysItsTokenizer) {
  data::TokenFileWriter writer(path("known"), {.vocab_size = 512, .tokenizer = "tok1:a"});
  writer.add_document(std::vector<std::int32_t>(tokens_.begin(), tokens_.end()));
  writer.finish();
  train(small("first",
              {"--training.dataset_path=" + path("known"), "--training.steps=1", "--checkpoint.last_save_in_hf"}),
        1);
  const auto told = describe_weights(path("first") + "/hf");
  ASSERT_FALSE(told.empty());
  EXPECT_EQ(nlohmann::json::parse(told[0].metadata).at("run").at("tokenizer").at("fingerprint"), "tok1:a");
}

TEST_F(TrainerIdentityTest, WeightsOfAnotherTokenizerThanTheDatasAreRefused) {
  for (const char* name : {"a", "b"}) {
    data::TokenFileWriter writer(path(name), {.vocab_size = 512, .tokenizer = std::string("tok1:") + name});
    writer.add_document(std::vector<std::int32_t>(tokens_.begin(), tokens_.end()));
    writer.finish();
  }
  train(small("first", {"--training.dataset_path=" + path("a"), "--training.steps=1", "--checkpoint.last_save_in_hf"}),
        1);
  for (const char* place : {"/checkpoint", "/hf"}) {
    const auto with = [&](const std::string& data, std::vector<std::string> more = {}) {
      more.insert(more.end(), {"--checkpoint.initial_load_path=" + path("first") + place, "--checkpoint.no-enable",
                               "--training.dataset_path=" + path(data), "--training.steps=1"});
      if (std::string(place) == "/hf") more.push_back("--checkpoint.initial_load_in_hf");
      return small("second", more);
    };
    EXPECT_THAT(log_of(with("a")), Not(HasSubstr("could not be compared"))) << place;
    EXPECT_THAT(refusal<CheckpointError>(with("b")),
                AllOf(HasSubstr("trained with the tokenizer tok1:a"), HasSubstr("data is tok1:b"),
                      HasSubstr("allow_tokenizer_mismatch")))
        << place;
    EXPECT_THAT(log_of(with("b", {"--training.allow_tokenizer_mismatch"})), HasSubstr("trained all the same"));
    EXPECT_THAT(log_of(with("tokens.bin")),
                HasSubstr("(tok1:a) could not be compared with that of the data (not said)"));
  }
}

// For a Hugging Face directory that another program made.
TEST_F(TrainerIdentityTest, TheTokenizerBesideWeightsIsTheirs) {
  const data::BpeTokenizer theirs = data::small_tokenizer("the cat sat on the mat. "),
                           other = data::small_tokenizer("abcdefg");
  for (const auto& [name, tokenizer] : {std::pair("theirs", &theirs), {"other", &other}}) {
    data::TokenFileWriter writer(path(name), {.vocab_size = 512, .tokenizer = data::tokenizer_fingerprint(*tokenizer)});
    writer.add_document(std::vector<std::int32_t>(tokens_.begin(), tokens_.end()));
    writer.finish();
  }
  train(small("first", {"--training.steps=1", "--checkpoint.last_save_in_hf"}), 1);
  theirs.save(path("first/hf/tokenizer.json"));
  for (const char* place : {"first/hf", "first/hf/model.safetensors"}) {
    const auto with = [&](const std::string& data) {
      return small("second", {"--checkpoint.initial_load_path=" + path(place), "--checkpoint.initial_load_in_hf",
                              "--checkpoint.no-enable", "--training.dataset_path=" + path(data), "--training.steps=1"});
    };
    EXPECT_THAT(log_of(with("theirs")), Not(HasSubstr("could not be compared with that of the data"))) << place;
    EXPECT_THAT(refusal<CheckpointError>(with("other")),
                AllOf(HasSubstr(data::tokenizer_fingerprint(theirs)),
                      HasSubstr("(so says " + path("first/hf") + "/tokenizer.json)")))
        << place;
  }
}

TEST_F(TrainerIdentityTest, WhatEndsDocumentsIsCarriedOnAndCompared) {
  const auto write = [&](const std::string& name, const std::string& tokenizer, std::optional<std::int64_t> end) {
    data::TokenFileWriter writer(path(name), {.vocab_size = 512, .tokenizer = tokenizer, .document_end = end});
    writer.add_document(std::vector<std::int32_t>(tokens_.begin(), tokens_.end()));
    writer.finish();
    return "--training.dataset_path=" + path(name);
  };
  const auto tokenizer_of = [&](int step) {
    const auto text = read_file(path(fmt::format("run/checkpoint/step-{}/manifest.json", step)));
    const auto manifest = nlohmann::json::parse(text);
    return manifest.at("metadata").at("run").at("tokenizer");
  };
  train(small("run", {write("said", "tok1:a", 0), "--training.steps=1"}), 1);
  train(small("run", {write("silent", "tok1:a", std::nullopt), "--training.steps=2"}), 1);
  EXPECT_EQ(tokenizer_of(2), (nlohmann::json{{"fingerprint", "tok1:a"}, {"vocab_size", 512}, {"document_end", 0}}));
  EXPECT_THAT(
      refusal<CheckpointError>(small("run", {write("bare", "tok1:a", data::kNoDocumentEnd), "--training.steps=3"})),
      HasSubstr("tokenizer document_end: saved 0, now \"none\""));
  train(small("run",
              {write("foreign", "tok1:b", std::nullopt), "--training.steps=3", "--training.allow_tokenizer_mismatch"}),
        1);
  EXPECT_FALSE(tokenizer_of(3).contains("document_end")) << "it is of the other tokenizer";
  const std::string initial = "--checkpoint.initial_load_path=" + path("run/checkpoint/step-1");
  EXPECT_THAT(
      log_of(small("second", {write("other", "tok1:a", 7), initial, "--training.steps=1"})),
      HasSubstr("the documents that they were trained on end by token 0; in this run's data \"document_end\" is 7"));
}

TEST_F(TrainerIdentityTest, WeightsThatSayNothingLoadAndOneLineSaysSo) {
  train(small("first", {"--training.steps=1"}), 1);
  std::vector<NamedTensor> weights;
  for (const NamedTensor& named : state_in("first", 1).tensors) {
    if (named.name.starts_with("model.")) weights.push_back({named.name.substr(6), named.tensor});
  }
  export_weights(path("bare.safetensors"), weights, {}, posix_file_system());
  EXPECT_THAT(log_of(small("second", {"--checkpoint.initial_load_path=" + path("bare.safetensors")})),
              AllOf(HasSubstr("nothing at " + path("bare.safetensors") + " says of which model they are"),
                    HasSubstr("could not be compared")));
}

TEST_F(TrainerIdentityTest, AModelDirectoryWithoutAWordOnWeightsIsRefused) {
  const std::string folder = hugging_face_model();
  const auto run = [&](const std::string& name, std::vector<std::string> more) {
    more.insert(more.end(), {"--model.flavor=hf", "--model.hf_assets_path=" + folder});
    return small(name, more);
  };
  EXPECT_THAT(refusal<ConfigError>(run("none", {})),
              AllOf(HasSubstr("initial_load_in_hf = true"), HasSubstr("initial_random_weights = true")));
  EXPECT_FALSE(std::filesystem::exists(path("none")));
  EXPECT_THAT(log_of(run("random", {"--checkpoint.initial_random_weights"})),
              HasSubstr("initial weights: random, of [debug] seed 0"));
  EXPECT_THAT(log_of(run("loaded", {"--checkpoint.initial_load_in_hf"})), Not(HasSubstr("random")));
  // A resumed run has its own weights.
  EXPECT_EQ(refusal<ConfigError>(run("loaded", {"--training.steps=3"})), "");
  EXPECT_THAT(error_text<ConfigError>([&] {
                run("both", {"--checkpoint.initial_load_in_hf", "--checkpoint.initial_random_weights"});
              }),
              HasSubstr("remove one of them"));
}

}  // namespace
}  // namespace phalanx::train
