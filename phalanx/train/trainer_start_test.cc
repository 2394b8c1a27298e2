// How a run starts: all ranks decide the same, whatever each of them sees, and fail with the same error.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/comm/testing/texts_of_ranks.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"
#include "phalanx/train/ranks/first_rank.h"
#include "phalanx/train/run_checkpoints.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

class TrainerStartTest : public TrainerTest {
 protected:
  /// The error of each rank, where each has another configuration.
  std::vector<std::string> told(int ranks, const std::function<config::TrainConfig(int rank)>& config) {
    return texts_of_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
      return error_with_kind([&] { Trainer trainer(config(world->rank()), {.world = world, .quiet = true}); });
    });
  }

  config::TrainConfig of_directory(const std::string& folder, std::vector<std::string> more = {}) const {
    more.insert(more.end(), {"--model.flavor=hf", "--model.hf_assets_path=" + folder, "--training.steps=1"});
    return config("run", std::move(more));
  }
};

/// Reads what is written to standard error, and runs an action once, as soon as a text appears in it.
class WatchedErrors {
 public:
  WatchedErrors(std::string text, std::function<void()> act) : kept_(::dup(STDERR_FILENO)) {
    int ends[2];
    if (::pipe(ends) != 0) throw Error("cannot make a pipe");
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[1]);
    reader_ = std::thread([this, from = ends[0], text = std::move(text), act = std::move(act)] {
      char block[4096];
      bool done = false;
      for (ssize_t size = 0; (size = ::read(from, block, sizeof block)) > 0;) {
        all_.append(block, static_cast<std::size_t>(size));
        if (done || all_.find(text) == std::string::npos) continue;
        done = true;
        act();
      }
      ::close(from);
    });
  }
  ~WatchedErrors() { finish(); }
  WatchedErrors(const WatchedErrors&) = delete;

  /// All that was written.
  std::string finish() {
    if (!reader_.joinable()) return all_;
    ::dup2(kept_, STDERR_FILENO);  // the pipe's last writer goes
    ::close(kept_);
    reader_.join();
    return all_;
  }

 private:
  int kept_;
  std::string all_;
  std::thread reader_;
};

// What the run that holds the folder saves while another run waits for it decides whether that run resumes.
TEST_F(TrainerStartTest, ARunThatWaitsForItsFolderGoesOnFromWhatTheHolderLeaves) {
  train(config("other", {"--training.steps=3"}), 1);
  auto holder = std::make_unique<FolderLock>(path("run"));
  WatchedErrors errors("waiting up to", [&] {
    std::filesystem::rename(path("other/checkpoint"), path("run/checkpoint"));
    holder.reset();
  });
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    Trainer trainer(config("run", {"--training.steps=4"}),
                    {.world = world, .job = {.name = "job", .lock_timeout = std::chrono::seconds(60)}});
    EXPECT_EQ(trainer.run().step, 4);
  });
  EXPECT_THAT(errors.finish(), AllOf(HasSubstr("continuing from"), Not(HasSubstr("initial weights: "))));
  EXPECT_EQ(losses("run").size(), 1u);
}

// As on a network file system whose other nodes do not see yet, or no longer see, what rank 0 does.
TEST_F(TrainerStartTest, OneRankLooksForAll) {
  train(config("run", {"--training.steps=1"}), 1);
  for (const bool first_sees : {true, false}) {
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      const bool sees = (world->rank() == 0) == first_sees;
      RunCheckpoints checkpoints(config(sees ? "run" : "none"), world, [](const std::string&) {});
      checkpoints.decide();
      EXPECT_EQ(checkpoints.resumes(), first_sees) << "rank " << world->rank();
    });
  }
}

// A folder with weights neither of a checkpoint nor of a new run cannot be started from.
TEST_F(TrainerStartTest, CheckpointsThatComeOrGoWhileARunStartsAreAnError) {
  train(config("run", {"--training.steps=1"}), 1);
  for (const bool there : {true, false}) {
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      RunCheckpoints checkpoints(config("run"), world, [](const std::string&) {});
      checkpoints.decide();
      EXPECT_EQ(checkpoints.resumes(), there);
      world->barrier();
      if (world->rank() == 0) std::filesystem::rename(path("run/checkpoint"), path("moved"));
      if (world->rank() == 0 && !there) std::filesystem::rename(path("kept"), path("run/checkpoint"));
      world->barrier();
      TrainState state = state_in_folder(there ? path("moved") : path("run/checkpoint"), 1);
      EXPECT_THAT(error_text<CheckpointError>([&] { checkpoints.load(state); }),
                  HasSubstr("something else writes to the folder"));
    });
    if (there) std::filesystem::rename(path("moved"), path("kept"));
  }
}

// A rank reads its own part of the files, so it may be the only one that finds an error in them.
TEST_F(TrainerStartTest, ATiedMatrixThatDiffersInOneRanksPartIsTheSameErrorOnAll) {
  train(config("tied", {"--model.tie_embeddings", "--training.steps=1", "--checkpoint.last_save_in_hf"}), 1);
  const std::string folder = path("tied") + "/hf";
  std::vector<NamedTensor> tensors;
  {
    const safetensors::File file(folder + "/model.safetensors");
    for (const auto& info : file.tensors()) {
      tensors.push_back({info.name, at::empty(info.shape, scalar_type_of(info.dtype))});
    }
  }
  load_weights(folder, tensors);
  const auto embeddings = std::ranges::find(tensors, "model.embed_tokens.weight", &NamedTensor::name);
  ASSERT_NE(embeddings, tensors.end());
  at::Tensor output = embeddings->tensor.clone();
  output[output.size(0) - 1][0].add_(1);  // in the last rank's rows
  tensors.push_back({"lm_head.weight", output});
  export_weights(folder + "/model.safetensors", tensors, {}, posix_file_system());
  for (const std::vector<std::string>& layout : {sharded(3), {"--parallelism.tensor_parallel_degree=2"}}) {
    std::vector<std::string> keys = layout;
    keys.insert(keys.end(), {"--checkpoint.initial_load_in_hf"});
    for (const std::string& message : told(2, [&](int) { return of_directory(folder, keys); })) {
      EXPECT_THAT(message, AllOf(HasSubstr("CheckpointError: rank 1: "), HasSubstr("are one matrix"))) << layout[0];
    }
  }
}

TEST_F(TrainerStartTest, FilesThatOneRankAloneCannotReadAreTheSameErrorOnAll) {
  train(config("source", {"--training.steps=1", "--checkpoint.last_save_in_hf"}), 1);
  const std::string folder = path("source") + "/hf", random = "--checkpoint.initial_random_weights";
  // The model's description.
  for (const std::string& message :
       told(2, [&](int rank) { return of_directory(rank == 1 ? path("nowhere") : folder, {random}); })) {
    EXPECT_THAT(message, AllOf(HasSubstr("rank 1: "), HasSubstr(path("nowhere"))));
  }
  // Its tokenizer.
  std::filesystem::copy(folder, path("many_ids"));
  data::BpeTrainer trainer({.vocab_size = 600});
  std::string text;
  for (int i = 0; i < 3000; ++i) text += std::to_string(i * 7919);
  trainer.add(text);
  trainer.train().save(path("many_ids/tokenizer.json"));
  for (const std::string& message :
       told(2, [&](int rank) { return of_directory(rank == 1 ? path("many_ids") : folder, {random}); })) {
    EXPECT_THAT(message, AllOf(HasSubstr("ConfigError: rank 1: "), HasSubstr("has 600 ids")));
  }
  // Its weights.
  std::filesystem::copy(folder, path("cut"));
  std::filesystem::resize_file(path("cut/model.safetensors"), 1000);
  const std::string in_hf = "--checkpoint.initial_load_in_hf";
  for (const std::string& message :
       told(2, [&](int rank) { return of_directory(rank == 1 ? path("cut") : folder, {in_hf}); })) {
    EXPECT_THAT(message, AllOf(HasSubstr("CheckpointError: rank 1: "), HasSubstr(path("cut"))));
  }
}

// A copy on each node, under different paths.
TEST_F(TrainerStartTest, DataAreTheSameOnAllRanksByTheirContent) {
  write_tokens("train.bin", tokens_);
  write_tokens("held out.bin", {tokens_.begin() + 1, tokens_.end()});
  const auto with = [&](const std::string& key, const std::string& file) {
    return [&, key, file](int rank) {
      const std::string same = key == "--training.dataset_path=" ? "train.bin" : "held out.bin";
      return config("run" + file,
                    {"--training.steps=1", "--training.dataset_path=" + path("train.bin"),
                     "--validation.dataset_path=" + path("held out.bin"), key + path(rank == 1 ? file : same)});
    };
  };
  for (const std::string key : {"--training.dataset_path=", "--validation.dataset_path="}) {
    const std::string section = key == "--training.dataset_path=" ? "data" : "validation";
    auto ids = tokens_;
    if (section == "validation") ids.erase(ids.begin());
    write_tokens("copy.bin", ids);
    ids[3] ^= 1;
    write_tokens("changed.bin", ids);
    for (const std::string& message : told(2, with(key, "copy.bin"))) EXPECT_EQ(message, "") << key;
    for (const std::string& message : told(2, with(key, "changed.bin"))) {
      EXPECT_THAT(message, AllOf(HasSubstr("the ranks do not have the same model, data and tokenizer"),
                                 HasSubstr("\n  " + section + ".content: "), HasSubstr(" on rank 0; "),
                                 HasSubstr(" on rank 1"), HasSubstr("give every rank the same files")));
    }
    for (const std::string& message : told(2, with(key, "missing.bin"))) {
      EXPECT_THAT(message, AllOf(HasSubstr("rank 1: "), HasSubstr(path("missing.bin"))));
    }
  }
}

// What only rank 0 writes before the first step.
TEST_F(TrainerStartTest, ARecordThatCannotBeWrittenIsTheSameErrorOnAll) {
  std::filesystem::create_directories(path("run/run.json"));
  const auto messages = told(2, [&](int) { return config("run"); });
  for (const std::string& message : messages) EXPECT_THAT(message, HasSubstr("run.json"));
}

TEST(OnEveryRank, TheErrorKeepsItsKindAndWhatIsNotOursItsPlace) {
  const auto kinds_of = [](const std::function<void(int rank)>& work) {
    return texts_of_ranks(3, [&](const std::shared_ptr<Communicator>& world) -> std::string {
      try {
        return error_with_kind([&] { on_every_rank(world, [&] { work(world->rank()); }); });
      } catch (const std::bad_alloc&) {
        return "bad_alloc";
      }
    });
  };
  EXPECT_THAT(kinds_of([](int) {}), Each(""));
  EXPECT_THAT(kinds_of([](int rank) {
                if (rank > 0) throw ConfigError("wrong key");
              }),
              Each("ConfigError: rank 1: wrong key"));
  EXPECT_THAT(kinds_of([](int) { throw DataError("no such file"); }), Each("DataError: no such file"));
  const auto kinds = kinds_of([](int rank) {
    if (rank == 1) throw std::bad_alloc();
  });
  EXPECT_EQ(kinds[1], "bad_alloc");
  EXPECT_THAT(kinds[0], StartsWith("Error: rank 1: "));
  EXPECT_THAT(kinds_of([](int) { throw FileError("config.json", ENOENT); }), Each("FileError: config.json"));
}

TEST(OnFirstRank, TheErrorIsOfOneClassOnAll) {
  const auto kinds = texts_of_ranks(3, [](const auto& world) {
    return error_with_kind([&] { on_first_rank(*world, [] { throw ConfigError("wrong key"); }); });
  });
  EXPECT_THAT(kinds, Each("ConfigError: wrong key"));
}

TEST(FromFirstRank, TheOthersWaitAsLongAsItWorks) {
  const CommunicatorOptions options{.first_timeout = std::chrono::milliseconds(1200)};
  run_local_ranks(
      3,
      [](const std::shared_ptr<Communicator>& world) {
        const std::string result = from_first_rank(*world, [](const std::function<void()>& still_working) {
          const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(2000);
          while (std::chrono::steady_clock::now() < end) still_working();
          return std::string("made");
        });
        EXPECT_EQ(result, "made");
      },
      options);
  const auto kinds = texts_of_ranks(3, [](const auto& world) {
    return error_with_kind(
        [&] { from_first_rank(*world, [](const auto&) -> std::string { throw DataError("chats.jsonl, line 3"); }); });
  });
  EXPECT_THAT(kinds, Each("DataError: chats.jsonl, line 3"));
}

}  // namespace
}  // namespace phalanx::train
